#!lua flags=allow-oom
-- Raise the attempt of requests before they are executed, so that a settle of an older one is fenced; drop what is
-- settled; tell jobs and journal what begins. Without jobs it is begin_requests.lua.
--
-- KEYS[1] u:{m}  hash of unsettled requests in groups (see group_values.lua); attempts are raised, never lowered
-- KEYS[2] n:{m}  hash; `owner` and `token` say who may decide about the model (read only)
-- KEYS[3] j:{m}  journal (only given with jobs or journalled requests); gets a `batched` fact
-- KEYS[4..] job:{m}:<id> the records of jobs, in the order below; get running, attempts and a `batched` event
--
-- ARGV[1] how many jobs
-- ARGV[2] the jobs' packed kind and detail
-- ARGV[3] the caller's owner token
-- ARGV[4] the attempt that begins
-- ARGV[5] g, how many groups
-- ARGV[6] the packed `batched` fact about the journalled requests, "" when none is
-- ARGV[7] which requests are journalled: "1" or "0" for each, "" when all are
-- then g group names, then g strings of last bytes, then the jobs: number of the request in this call, ...
--
-- Returns 0 when the token is not the owner's (any more), 1 when all requests are unsettled, else a string with one
-- character for each: "1" unsettled, "0" settled or unknown.

--#include group_values.lua
--#include raise_groups.lua
--#include job_events.lua
--#include tell.lua

local lease = redis.call('HMGET', KEYS[2], 'owner', 'token')
if not lease[1] or lease[2] ~= ARGV[3] then
  return 0
end

local groups = tonumber(ARGV[5])
local mask = raise_groups(KEYS[1], 8, groups, tonumber(ARGV[4]))

local first_job = 8 + 2 * groups
for i = 1, tonumber(ARGV[1]) do
  if not mask or string.byte(mask, ARGV[first_job + i - 1]) == 49 then
    local job = redis.call('HMGET', KEYS[3 + i], 's', 'v')
    if job[1] == 'q' or job[1] == 'r' then
      local last = (job[2] or 1) + 1
      redis.call('HSET', KEYS[3 + i], 's', 'r', 'a', ARGV[4], 'v', last, 'e' .. last, event(now_us(), ARGV[2]))
    end
  end
end

if ARGV[6] ~= '' then
  tell(KEYS[3], ARGV[6], mask, ARGV[7])
end
return mask or 1
