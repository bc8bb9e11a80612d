"""Entries in Redis."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import chain as joined
from typing import Any

from redis.asyncio import from_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError

from triton_openai.config.tree import ResponsesSettings
from triton_openai.storage.store import (
    BATCH,
    BATCH_SIZE,
    LARGEST,
    TOUCH_SECONDS,
    Chain,
    Change,
    Entry,
    EntryFull,
    Link,
    Page,
    Place,
    Row,
    Store,
)

_PREFIX = "triton-openai:"
# The clock there is asked again after so many seconds: it may be set, and no two run alike.
_CLOCK_SECONDS = 60.0
# An entry is a hash with its fields, and `=ID` for the data and `@ID` for the member of each row. Its rows have their
# order in a sorted set, whose members are `LIST:POSITION:ID`. Of each owner a sorted set has the times at which entries
# were used, another one their keys in order, and one sorted set has the sizes of all owners. A set has the entries that
# go on from an entry.
_SCRIPT = """
local op, prefix, deadline, given = ARGV[1], ARGV[2], tonumber(ARGV[3]), cjson.decode(ARGV[4])
local call, key, clock = redis.call, given.key, redis.call('TIME')
local now = clock[1] + clock[2] / 1000000
if now > deadline then return redis.error_reply('LATE') end
local function entry(of) return prefix .. 'entry:' .. of end
local function rows(of) return prefix .. 'rows:' .. of end
local function heirs(of) return prefix .. 'next:' .. of end
local function field(of, ...) return unpack(call('HMGET', entry(of), ...)) end
local function use(of, owner)
  call('HSET', entry(of), 'used', string.format('%.6f', now))
  call('ZADD', prefix .. 'used:' .. owner, now, of)
end
local function left(of) return string.format('%.6f', field(of, 'until') - now) end
local function found(of, wanted)
  local owner, used = field(of, 'owner', 'used')
  if not owner or (wanted and owner ~= wanted) or tonumber(used) < now - given.age then return false end
  if tonumber(used) < now - given.touch then use(of, owner) end
  return owner
end
local function grow(of, owner, size, count)
  call('HINCRBY', entry(of), 'size', size)
  call('HINCRBY', entry(of), 'rows', count)
  call('ZINCRBY', prefix .. 'owners', size, owner)
end
local function drop(of, owner)
  local size, parent = field(of, 'size', 'parent')
  size = tonumber(size or 0)
  if parent then call('SREM', heirs(parent), of) end
  call('UNLINK', entry(of), rows(of), heirs(of))
  call('ZREM', prefix .. 'used:' .. owner, of)
  call('ZREM', prefix .. 'keys:' .. owner, of)
  call('ZINCRBY', prefix .. 'owners', -size, owner)
  if call('EXISTS', prefix .. 'used:' .. owner) == 0 then call('ZREM', prefix .. 'owners', owner) end
  return size
end
local function listed(of, name)
  local ids = call('ZRANGEBYLEX', rows(of), '[' .. name .. ':', '(' .. name .. ';')
  for i, member in ipairs(ids) do ids[i] = string.sub(member, #name + 18) end
  return ids
end
if op == 'get' then
  if not found(key) then return nil end
  return {left(key), field(key, 'owner', 'head', 'version', 'parent', 'size', 'rows')}
elseif op == 'change' then
  local owner, version, holder, ends, size, count = field(key, 'owner', 'version', 'holder', 'until', 'size', 'rows')
  local lease, head, new, members = given.lease, ARGV[5], {}, {}
  if (given.version == 0) == (owner ~= false) or (owner and given.owner and owner ~= given.owner)
    or (given.version and given.version ~= tonumber(version or 0)) then return 0 end
  if lease and given.needs ~= '' and holder ~= lease[1] and (given.needs == 'held' or tonumber(ends) > now) then
    return 0
  end
  owner, size, count = owner or given.owner, tonumber(size or 0), tonumber(count or 0)
  local grown, added = 0, 0
  for i = 6, #ARGV, 3 do
    local id = ARGV[i + 1]
    if not new[id] and call('HEXISTS', entry(key), '@' .. id) == 0 then
      new[id], grown, added = i, grown + #ARGV[i + 2], added + 1
    end
  end
  if #ARGV > 5 and (count + added > given.most_rows or size + grown > given.most_size) then
    return redis.error_reply('FULL')
  end
  if given.version then
    grown = grown + #head - call('HSTRLEN', entry(key), 'head')
    call('HSET', entry(key), 'owner', owner, 'version', given.version + 1, 'head', head)
  end
  if given.version == 0 then call('ZADD', prefix .. 'keys:' .. owner, 0, key) end
  if given.version == 0 and given.parent then
    local parent = given.parent
    for i = #given.ancestors, 1, -1 do
      if call('EXISTS', entry(given.ancestors[i])) == 1 then parent = given.ancestors[i] end
    end
    if call('EXISTS', entry(given.parent)) == 1 then parent = given.parent end
    call('HSET', entry(key), 'parent', parent)
    call('SADD', heirs(parent), key)
  end
  if lease or given.version == 0 then
    -- One that is ended is over by any clock.
    local held = lease and lease[2] ~= 0
    ends = held and string.format('%.6f', now + lease[2]) or 0
    call('HSET', entry(key), 'holder', held and lease[1] or '', 'until', ends)
  end
  for i = 6, #ARGV, 3 do
    local id = ARGV[i + 1]
    if new[id] == i then
      local member = ARGV[i] .. ':' .. string.format('%015d', call('HINCRBY', entry(key), 'next', 1)) .. ':' .. id
      call('HSET', entry(key), '=' .. id, ARGV[i + 2], '@' .. id, member)
      call('ZADD', rows(key), 0, member)
    end
  end
  grow(key, owner, grown, added)
  use(key, owner)
  return 1
elseif op == 'page' then
  local first, last, data, size = '[' .. given.name .. ':', '(' .. given.name .. ';', {}, 0
  if given.after then
    local after = field(key, '@' .. given.after)
    if not after or string.sub(after, 1, #given.name + 1) ~= given.name .. ':' then return nil end
    if given.reverse then last = '(' .. after else first = '(' .. after end
  end
  if given.reverse then first, last = last, first end
  local range = given.reverse and 'ZREVRANGEBYLEX' or 'ZRANGEBYLEX'
  local members = call(range, rows(key), first, last, 'LIMIT', 0, given.limit + 1)
  for i = 1, math.min(#members, given.limit) do
    local id = string.sub(members[i], #given.name + 18)
    size = size + call('HSTRLEN', entry(key), '=' .. id)
    if i > 1 and size > given.most_size then break end
    data[2 * i - 1], data[2 * i] = id, field(key, '=' .. id)
  end
  return {#members, data}
elseif op == 'sizes' or op == 'fetch' then
  local data = {}
  for i, place in ipairs(given.places) do
    local own = found(place[1], given.owner)
    data[i] = own and field(place[1], '=' .. place[2])
    if op == 'sizes' and data[i] then data[i] = #data[i] end
  end
  return data
elseif op == 'chain' then
  local links, fields, data, count, size = {}, {}, {}, 0, 0
  while key and #links < given.most do
    local own, of = found(key, given.owner), {}
    for _, name in ipairs(own and given.names or {}) do
      for _, id in ipairs(listed(key, name)) do
        of[#of + 1] = '=' .. id
        count, size = count + 1, size + call('HSTRLEN', entry(key), '=' .. id)
      end
    end
    links[#links + 1], fields[#fields + 1] = {key, own and left(key)}, of
    key = own and field(key, 'parent')
  end
  for i = count <= given.most_rows and size <= given.most_size and #links or 0, 1, -1 do
    for _, one in ipairs(fields[i]) do data[#data + 1] = field(links[i][1], one) end
  end
  return {links, data, count, size}
elseif op == 'entries' then
  local keys, range = prefix .. 'keys:' .. given.owner, given.reverse and 'ZREVRANGEBYLEX' or 'ZRANGEBYLEX'
  local data = call(range, keys, '(' .. given.first, '(' .. given.last, 'LIMIT', 0, given.limit)
  for i, of in ipairs(data) do data[i] = {of, found(of, given.owner) and field(of, 'head')} end
  return data
elseif op == 'delete' then
  local owner, parent = field(key, 'owner', 'parent')
  for _, of in ipairs(owner and given.bridged and call('SMEMBERS', heirs(key)) or {}) do
    call('HDEL', entry(of), 'parent')
    if parent then
      call('HSET', entry(of), 'parent', parent)
      call('SADD', heirs(parent), of)
    end
  end
  if owner then drop(key, owner) end
  return owner and 1 or 0
elseif op == 'delete_row' then
  local owner, member = field(key, 'owner', '@' .. given.id)
  if not member then return 0 end
  grow(key, owner, 0 - call('HSTRLEN', entry(key), '=' .. given.id), -1)
  call('HDEL', entry(key), '=' .. given.id, '@' .. given.id)
  call('ZREM', rows(key), member)
  use(key, owner)
  return 1
elseif op == 'drop' then
  local total, oldest = 0, call('ZRANGE', prefix .. 'used:' .. given.owner, 0, given.batch - 1, 'WITHSCORES')
  for i = 1, #oldest, 2 do
    if (tonumber(oldest[i + 1]) >= given.before and total >= given.surplus) or total > given.batch_size then break end
    total = total + drop(oldest[i], given.owner)
  end
  return total
end
"""


class RedisStore(Store):
    """Keeps entries in Redis, which several machines may share. The clock is the server's."""

    def __init__(self, url: str, settings: ResponsesSettings) -> None:
        super().__init__(settings)
        # Once more, for a connection that the server has closed. By default it tries for a minute.
        self._client: Any = from_url(url, retry=Retry(NoBackoff(), 1))
        self._script = self._client.register_script(_SCRIPT)
        #: By how much the server's clock is ahead of the monotonic one here, and when that was found out.
        self._ahead, self._asked = 0.0, -_CLOCK_SECONDS

    async def _ping(self) -> None:
        async with self._operation(inner=True):
            await self._client.ping()

    async def _call(self, operation: str, *, data: Sequence[Any] = (), inner: bool = False, **given: Any) -> Any:
        """Run an *operation* of the script; one that the server gets to later than we wait for it does nothing."""
        async with self._operation(inner=inner):
            if time.monotonic() >= self._asked + _CLOCK_SECONDS:
                seconds, microseconds = await self._client.time()
                self._asked = time.monotonic()
                self._ahead = seconds + microseconds / 1e6 - self._asked
            deadline = f"{time.monotonic() + self._ahead + self.timeout:.6f}"
            wanted = {name: value for name, value in given.items() if value is not None}
            wanted.update(age=self._settings.max_age_seconds, touch=TOUCH_SECONDS)
            try:
                return await self._script(args=[operation, _PREFIX, deadline, json.dumps(wanted), *data])
            except ResponseError as error:
                if "FULL" in str(error):
                    raise EntryFull from error
                # Perhaps a clock was set.
                self._asked = -_CLOCK_SECONDS
                raise

    async def get(self, key: str) -> Entry | None:
        found = await self._call("get", key=key)
        if found is None:
            return None
        left, owner, head, version, parent, size, rows = found
        parent = parent and parent.decode()
        return Entry(owner.decode(), head, int(version), parent, _end(left), int(size), int(rows))

    async def _change(self, key: str, change: Change) -> bool:
        given = change._asdict()
        data = (given.pop("head") or b"", *joined(*given.pop("rows")))
        return bool(await self._call("change", data=data, key=key, **given))

    async def page(
        self, key: str, name: str, *, after: str | None = None, limit: int, most_size: int, reverse: bool = False
    ) -> Page | None:
        found = await self._call(
            "page", key=key, name=name, after=after, limit=limit, most_size=most_size, reverse=reverse
        )
        if found is None:
            return None
        count, data = found
        rows = [Row(name, row_id.decode(), one) for row_id, one in zip(data[::2], data[1::2], strict=True)]
        return Page(rows, len(rows) < count)

    async def _at(self, what: str, owner: str, places: Collection[Place]) -> Mapping[Place, Any]:
        found = await self._call(what, owner=owner, places=list(places))
        return {place: one for place, one in zip(places, found, strict=True) if one is not None}

    async def chain(
        self, key: str, owner: str, names: Sequence[str], *, most: int, most_rows: int = LARGEST,
        most_size: int = LARGEST,
    ) -> Chain:  # fmt: skip
        links, *rest = await self._call(
            "chain", key=key, owner=owner, names=sorted(names), most=most, most_rows=most_rows, most_size=most_size
        )
        return Chain([Link(link.decode(), left is not None, _end(left)) for link, left in links], *rest)

    async def entries(
        self, owner: str, prefix: str, *, after: str | None, limit: int, reverse: bool
    ) -> Sequence[tuple[str, bytes | None]]:
        first, last = (after or f"{prefix}g", prefix) if reverse else (after or prefix, f"{prefix}g")
        found = await self._call("entries", owner=owner, first=first, last=last, limit=limit, reverse=reverse)
        return [(key.decode(), head) for key, head in found]

    async def delete(self, key: str, *, bridged: bool = False) -> bool:
        return bool(await self._call("delete", key=key, bridged=bridged))

    async def delete_row(self, key: str, row_id: str) -> bool:
        return bool(await self._call("delete_row", key=key, id=row_id))

    async def owners(self) -> Mapping[str, int]:
        async with self._operation(inner=True):
            found = await self._client.zrange(f"{_PREFIX}owners", 0, -1, withscores=True)
        return {owner.decode(): int(size) for owner, size in found}

    async def _drop(self, owner: str, before: float, surplus: int) -> int:
        dropped = await self._call(
            "drop", inner=True, owner=owner, before=before, surplus=surplus, batch=BATCH, batch_size=BATCH_SIZE
        )
        return int(dropped)

    async def _disconnect(self) -> None:
        await self._client.aclose()


def _end(left: bytes | None) -> float:
    """Return when a lease ends, by the clock here, of which the seconds *left* are known."""
    return 0.0 if left is None else time.time() + float(left)
