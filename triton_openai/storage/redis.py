"""Entries in Redis."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

from triton_openai.config.tree import ResponsesSettings
from triton_openai.storage.store import (
    BATCH,
    TOUCH_SECONDS,
    Entry,
    EntryFull,
    Link,
    Page,
    Place,
    Row,
    Store,
    driver,
    oldest,
    within,
)

_PREFIX = "triton-openai:"
# Bytes that are read at once: the client works on a value as a whole.
_MOST_AT_ONCE = 4 * 1024 * 1024
# An entry is a hash with its fields, and `=ID` for the data and `@ID` for the member of each row. Its rows have their
# order in a sorted set, whose members are `LIST:POSITION:ID`. Of each owner there are a sorted set with the times at
# which entries were used and a hash with their sizes, and one sorted set has the sizes of all owners.
_SCRIPT = """
local op, prefix, deadline, key = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1000000
if now > deadline then return redis.error_reply('LATE') end
local function entry(of) return prefix .. 'entry:' .. of end
local function rows(of) return prefix .. 'rows:' .. of end
local function field(name) return redis.call('HGET', entry(key), name) end
local function listed(name)
  local ids = redis.call('ZRANGEBYLEX', rows(key), '[' .. name .. ':', '(' .. name .. ';')
  for i, member in ipairs(ids) do ids[i] = string.sub(member, #name + 18) end
  return ids
end
local function used(owner)
  redis.call('HSET', entry(key), 'used', string.format('%.6f', now))
  redis.call('ZADD', prefix .. 'used:' .. owner, now, key)
end
local function grow(owner, size)
  redis.call('HINCRBY', entry(key), 'size', size)
  redis.call('HINCRBY', prefix .. 'sizes:' .. owner, key, size)
  redis.call('ZINCRBY', prefix .. 'owners', size, owner)
end
local function drop(owner, of)
  local size = tonumber(redis.call('HGET', prefix .. 'sizes:' .. owner, of) or 0)
  redis.call('UNLINK', entry(of), rows(of))
  redis.call('HDEL', prefix .. 'sizes:' .. owner, of)
  redis.call('ZREM', prefix .. 'used:' .. owner, of)
  redis.call('ZINCRBY', prefix .. 'owners', -size, owner)
end
local function lease(holder, seconds)
  -- One that is ended is over by any clock.
  local ends = seconds > 0 and now + seconds or 0
  redis.call('HSET', entry(key), 'holder', holder, 'until', string.format('%.6f', ends))
end
local function append(owner, first, most_rows, most_size)
  local count, size, new = tonumber(field('rows') or 0), tonumber(field('size') or 0), {}
  for i = first, #ARGV, 3 do
    if field('@' .. ARGV[i + 1]) == false and new[ARGV[i + 1]] == nil then
      new[ARGV[i + 1]], count, size = i, count + 1, size + #ARGV[i + 2]
    end
  end
  if count > most_rows or size > most_size then return redis.error_reply('FULL') end
  local grown = 0
  for i = first, #ARGV, 3 do
    local id = ARGV[i + 1]
    if new[id] == i then
      local member = ARGV[i] .. ':' .. string.format('%015d', redis.call('HINCRBY', entry(key), 'next', 1)) .. ':' .. id
      redis.call('HSET', entry(key), '=' .. id, ARGV[i + 2], '@' .. id, member)
      redis.call('ZADD', rows(key), 0, member)
      grown = grown + #ARGV[i + 2]
    end
  end
  redis.call('HSET', entry(key), 'rows', count)
  grow(owner, grown)
  used(owner)
  return 1
end
if op == 'put' then
  local owner, version, head = ARGV[5], tonumber(ARGV[6]), ARGV[7]
  if tonumber(field('version') or 0) ~= version or (version > 0 and field('owner') ~= owner) then return 0 end
  local grown = #head - redis.call('HSTRLEN', entry(key), 'head')
  redis.call('HSET', entry(key), 'owner', owner, 'version', version + 1, 'head', head)
  if version == 0 and ARGV[8] ~= '' then redis.call('HSET', entry(key), 'parent', ARGV[8]) end
  if ARGV[10] ~= '' then lease(ARGV[9], tonumber(ARGV[10])) end
  grow(owner, grown)
  return append(owner, 11, math.huge, math.huge)
elseif op == 'append' then
  if field('owner') ~= ARGV[5] or (ARGV[8] ~= '' and field('holder') ~= ARGV[8]) then return 0 end
  if ARGV[8] ~= '' then lease(ARGV[8], tonumber(ARGV[9])) end
  return append(ARGV[5], 10, tonumber(ARGV[6]), tonumber(ARGV[7]))
elseif op == 'claim' then
  local holder, seconds = ARGV[5], tonumber(ARGV[6])
  local held = field('holder')
  if held == false or (held ~= holder and (ARGV[7] == '1' or tonumber(field('until')) > now)) then return 0 end
  lease(seconds > 0 and holder or '', seconds)
  used(field('owner'))
  return 1
elseif op == 'touch' then
  local owner = field('owner')
  if owner then used(owner) end
elseif op == 'delete' then
  local owner = field('owner')
  if owner == false then return 0 end
  drop(owner, key)
  return 1
elseif op == 'delete_row' then
  local member = field('@' .. ARGV[5])
  if member == false then return 0 end
  local owner = field('owner')
  grow(owner, -redis.call('HSTRLEN', entry(key), '=' .. ARGV[5]))
  redis.call('HDEL', entry(key), '=' .. ARGV[5], '@' .. ARGV[5])
  redis.call('HINCRBY', entry(key), 'rows', -1)
  redis.call('ZREM', rows(key), member)
  used(owner)
  return 1
elseif op == 'drop' then
  for i = 5, #ARGV do drop(key, ARGV[i]) end
  if redis.call('ZCARD', prefix .. 'used:' .. key) == 0 then redis.call('ZREM', prefix .. 'owners', key) end
elseif op == 'chain' then
  local found, link, most = {}, key, tonumber(ARGV[6])
  while link and #found < most do
    key = link
    local owner, parent, ends, last = unpack(redis.call('HMGET', entry(key), 'owner', 'parent', 'until', 'used'))
    local count, size, there = 0, 0, owner == ARGV[5] and tonumber(last) >= now - tonumber(ARGV[7])
    for i = 8, there and #ARGV or 0 do
      for _, id in ipairs(listed(ARGV[i])) do
        count, size = count + 1, size + redis.call('HSTRLEN', entry(key), '=' .. id)
      end
    end
    local line = {link, there and 1 or 0, ends or 0, count, string.format('%d', size), last or 0}
    found[#found + 1] = table.concat(line, ' ')
    link = there and parent
  end
  return table.concat(found, ';')
elseif op == 'rows' then
  local owner, lengths, data, size = key, {}, {}, 0
  for i = 8, #ARGV, 2 do
    if size >= tonumber(ARGV[7]) then break end
    key = ARGV[i]
    local own = field('owner') == owner and tonumber(field('used')) >= now - tonumber(ARGV[5])
    lengths[#lengths + 1] = own and redis.call('HSTRLEN', entry(key), '=' .. ARGV[i + 1]) or 0
    if ARGV[6] == 'data' then
      data[#data + 1] = own and field('=' .. ARGV[i + 1]) or ''
      size = size + #data[#data]
    end
  end
  return {table.concat(lengths, ' '), table.concat(data)}
elseif op == 'read' then
  local names, lengths, data, skip, size = key, {}, {}, tonumber(ARGV[5]), 0
  for i = 7, #ARGV do
    key = ARGV[i]
    for name in string.gmatch(names, '[^ ]+') do
      for _, id in ipairs(listed(name)) do
        skip = skip - 1
        if skip < 0 and size < tonumber(ARGV[6]) then
          data[#data + 1] = field('=' .. id)
          lengths[#lengths + 1] = #data[#data]
          size = size + #data[#data]
        end
      end
    end
  end
  return {table.concat(lengths, ' '), table.concat(data)}
end
return 1
"""


class RedisStore(Store):
    """Keeps entries in Redis, which several machines may share. The clock is the server's."""

    def __init__(self, url: str, settings: ResponsesSettings) -> None:
        super().__init__(settings)
        redis, retry = driver("redis.asyncio", "redis"), driver("redis.asyncio.retry", "redis").Retry
        # Once more, for a connection that the server has closed. By default it tries for a minute.
        again = retry(driver("redis.backoff", "redis").NoBackoff(), 1)
        self._client = redis.from_url(url, retry=again)
        self._refused = driver("redis.exceptions", "redis").ResponseError
        self._script = self._client.register_script(_SCRIPT)
        #: By how much the server's clock is ahead of the monotonic one here.
        self._ahead: float | None = None

    async def _ping(self) -> None:
        async with self._operation(inner=True):
            await self._client.ping()

    async def _now(self) -> float:
        if self._ahead is None:
            seconds, microseconds = await self._client.time()
            self._ahead = seconds + microseconds / 1e6 - time.monotonic()
        return time.monotonic() + self._ahead

    async def _call(self, operation: str, key: str, *values: Any, inner: bool = False) -> Any:
        """Run an *operation* of the script; one that the server gets to later than we wait for it does nothing."""
        async with self._operation(inner=inner):
            deadline = await self._now() + self.timeout
            try:
                return await self._script(args=[operation, _PREFIX, f"{deadline:.6f}", key, *values])
            except self._refused as error:
                if "FULL" in str(error):
                    raise EntryFull from error
                # Perhaps a clock was set.
                self._ahead = None
                raise

    async def get(self, key: str) -> Entry | None:
        async with self._operation():
            fields = ("owner", "head", "version", "parent", "until", "size", "rows", "used")
            found = await self._client.hmget(_entry(key), *fields)
            now = await self._now()
        owner, head, version, parent, until, size, rows, used = found
        if owner is None or float(used) < now - self._settings.max_age_seconds:
            return None
        if float(used) < now - TOUCH_SECONDS:
            await self._call("touch", key)
        # The lease ends by the clock here.
        ends = float(until) - now + time.time()
        parent = parent and parent.decode()
        return Entry(owner.decode(), head, int(version), parent, ends, int(size), int(rows))

    async def put(
        self, key: str, owner: str, head: bytes, version: int, *, rows: Sequence[Row] = (), parent: str | None = None,
        lease: tuple[str, float] | None = None,
    ) -> bool:  # fmt: skip
        async with self._operation():
            self._charge(owner, rows, len(head))
        held = lease or ("", 0 if version == 0 else "")
        return bool(await self._call("put", key, owner, version, head, parent or "", *held, *chain(*rows)))

    async def append(
        self, key: str, owner: str, rows: Sequence[Row], *, most_rows: int | None = None, most_size: int | None = None,
        lease: tuple[str, float] | None = None,
    ) -> bool:  # fmt: skip
        async with self._operation():
            self._charge(owner, rows)
        most = (most_rows or "inf", most_size or "inf")
        return bool(await self._call("append", key, owner, *most, *(lease or ("", 0)), *chain(*rows)))

    async def claim(self, key: str, holder: str, seconds: float, *, renew: bool = False) -> bool:
        return bool(await self._call("claim", key, holder, seconds, int(renew)))

    async def page(
        self, key: str, name: str, *, after: str | None = None, limit: int, most_size: int, reverse: bool = False
    ) -> Page | None:
        async with self._operation():
            first, last = f"[{name}:", f"({name};"
            if after is not None:
                member = await self._client.hget(_entry(key), f"@{after}")
                if member is None or not member.startswith(f"{name}:".encode()):
                    return None
                first, last = (first, b"(" + member) if reverse else (b"(" + member, last)
            ends = (last, first) if reverse else (first, last)
            listed = self._client.zrevrangebylex if reverse else self._client.zrangebylex
            ids = [_row_id(member) for member in await listed(_rows(key), *ends, start=0, num=limit + 1)]
            owner = await self._client.hget(_entry(key), "owner")
        places = [Place(key, row_id) for row_id in ids]
        sizes = await self._rows_at(owner, "size", places)
        shown = places[: within([size for size, _ in sizes], limit, most_size)]
        data = await self._rows_at(owner, "data", shown)
        # One that somebody deletes meanwhile is not there.
        rows = [Row(name, place.id, one) for place, (size, one) in zip(shown, data, strict=True) if size]
        return Page(rows, len(shown) < len(ids))

    async def _rows_at(self, owner: str, what: str, places: Collection[Place]) -> Sequence[tuple[int, bytes]]:
        """Return sizes of rows, 0 for none, and their data."""
        head = (owner, self._settings.max_age_seconds, what, _MOST_AT_ONCE)
        rest, found = list(places), list[tuple[int, bytes]]()
        while rest:
            some = _split(await self._call("rows", *head, *chain(*rest)))
            found += some
            del rest[: len(some)]
        return found

    async def sizes(self, owner: str, places: Collection[Place]) -> Mapping[Place, int]:
        found = zip(places, await self._rows_at(owner, "size", places), strict=True)
        return {place: size for place, (size, _) in found if size}

    async def fetch(self, owner: str, places: Collection[Place]) -> Mapping[Place, bytes]:
        found = zip(places, await self._rows_at(owner, "data", places), strict=True)
        return {place: data for place, (size, data) in found if size}

    async def chain(self, key: str, owner: str, names: Sequence[str], *, most: int) -> Sequence[Link]:
        found = await self._call("chain", key, owner, most, self._settings.max_age_seconds, *names)
        # Leases end by the clock here.
        now = await self._now()
        ahead = now - time.time()
        links = []
        for line in found.decode().split(";"):
            link, there, until, rows, size, used = line.split(" ")
            links.append(Link(link, there == "1", float(until) - ahead, int(rows), int(size)))
            if there == "1" and float(used) < now - TOUCH_SECONDS:
                await self._call("touch", link)
        return links

    async def read(self, keys: Sequence[str], names: Sequence[str]) -> Sequence[bytes]:
        rows: list[bytes] = []
        while some := _split(await self._call("read", " ".join(names), len(rows), _MOST_AT_ONCE, *keys)):
            rows += [data for _, data in some]
        return rows

    async def delete(self, key: str) -> bool:
        return bool(await self._call("delete", key))

    async def delete_row(self, key: str, row_id: str) -> bool:
        return bool(await self._call("delete_row", key, row_id))

    async def owners(self) -> Mapping[str, int]:
        async with self._operation(inner=True):
            found = await self._client.zrange(f"{_PREFIX}owners", 0, -1, withscores=True)
        return {owner.decode(): int(size) for owner, size in found}

    async def _drop(self, owner: str, before: float, surplus: int) -> int:
        async with self._operation(inner=True):
            found = await self._client.zrange(f"{_PREFIX}used:{owner}", 0, BATCH - 1, withscores=True)
            keys = [key for key, _ in found]
            sizes = await self._client.hmget(f"{_PREFIX}sizes:{owner}", keys) if keys else []
        dated = [(key.decode(), used, int(size or 0)) for (key, used), size in zip(found, sizes, strict=True)]
        dropped = oldest(dated, before, surplus)
        if dropped:
            await self._call("drop", owner, *[key for key, _ in dropped], inner=True)
        return sum(size for _, size in dropped)

    async def _disconnect(self) -> None:
        await self._client.aclose()


def _entry(key: str) -> str:
    return f"{_PREFIX}entry:{key}"


def _rows(key: str) -> str:
    return f"{_PREFIX}rows:{key}"


def _row_id(member: bytes) -> str:
    """Return the id of the row that *member* of the sorted set stands for."""
    return member.split(b":", 2)[2].decode()


def _split(found: tuple[bytes, bytes]) -> Sequence[tuple[int, bytes]]:
    """Return lengths, and the data of each from one value: thousands of values take the client long to read."""
    sizes = [int(size) for size in found[0].split()]
    return [(size, found[1][end - size : end]) for size, end in zip(sizes, accumulate(sizes), strict=True)]
