// The versions of a message: a question before it was changed, or an answer before it was made again, and what followed.
// A chat's messages are those on the screen. The first of them that differs in another version has `branches`: which
// version this is, and of each other one the messages from there on.

/** Return all versions of the messages from `at` on. */
function versions(messages, at) {
  const [{ branches = { index: 0, tails: [] }, ...first }, ...rest] = messages.slice(at);
  const all = [...branches.tails];
  all.splice(branches.index, 0, [first, ...rest]);
  return all;
}

/** Put the version `index` of `all` in the place of the messages from `at` on. */
function put(messages, at, all, index) {
  const [first, ...rest] = all[index], tails = all.filter((_, other) => other !== index);
  messages.splice(at, messages.length, { ...first, ...(tails.length && { branches: { index, tails } }) }, ...rest);
}

/** Take away the messages from `at` on. Return the `branches` of a further version of them. */
export function fork(messages, at) {
  const tails = versions(messages, at);
  messages.splice(at);
  return { index: tails.length, tails };
}

/** Show the version `index` of the messages from `at` on. */
export function choose(messages, at, index) {
  put(messages, at, versions(messages, at), index);
}

/** Delete the messages from `at` on. Another version takes their place, if there is one. */
export function remove(messages, at) {
  const { index, tails } = messages[at].branches ?? { tails: [] };
  if (tails.length) put(messages, at, tails, Math.min(index, tails.length - 1));
  else messages.splice(at);
}

/** Return the messages of a list and of its other versions. */
export function every(messages) {
  return messages.flatMap((message) => [message, ...(message.branches?.tails ?? []).flatMap(every)]);
}

/** Return `messages` and their other versions, with each message as `change` returns it. */
export function changed(messages, change) {
  return messages.map(change).map((message) => (message.branches
    ? { ...message, branches: { ...message.branches, tails: message.branches.tails.map((tail) => changed(tail, change)) } } : message));
}
