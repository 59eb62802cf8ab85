#!lua flags=allow-oom
-- Raise the attempt of requests that are no jobs; in all else like begin_attempt.lua.
--
-- KEYS[1] u:{m}  hash of unsettled requests in groups (see group_values.lua); attempts are raised, never lowered
-- KEYS[2] n:{m}  hash; `owner` and `token` say who may decide about the model (read only)
-- KEYS[3] j:{m}  journal (only given with a fact); gets the `batched` fact
--
-- ARGV[1] the caller's owner token
-- ARGV[2] the attempt that begins
-- ARGV[3] g, how many groups
-- ARGV[4] the packed `batched` fact about the journalled requests, "" when none is
-- ARGV[5] which requests are journalled: "1" or "0" for each, "" when all are
-- then g group names, then g strings of last bytes
--
-- Returns 0 when the token is not the owner's (any more), 1 when all requests are unsettled, else a string with one
-- character for each: "1" unsettled, "0" settled or unknown.

--#include group_values.lua
--#include raise_groups.lua
--#include tell.lua

local lease = redis.call('HMGET', KEYS[2], 'owner', 'token')
if not lease[1] or lease[2] ~= ARGV[1] then
  return 0
end
local mask = raise_groups(KEYS[1], 6, tonumber(ARGV[3]), tonumber(ARGV[2]))
if KEYS[3] then
  tell(KEYS[3], ARGV[4], mask, ARGV[5])
end
return mask or 1
