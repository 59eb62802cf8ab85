#!lua
-- Record one job of a model: as accept.lua records a request, with its job record and its idempotency record.
-- Refused as a whole when the server is out of memory (no allow-oom), so that no half is ever written.
--
-- KEYS[1] q:{m}:<level>:<lane>  stream; gets one entry with all fields
-- KEYS[2] u:{m}                 hash of unsettled requests in groups (see group_values.lua); gets the job, attempt 0
-- KEYS[3] n:{m}                 hash; `requests` and `bytes` grow, `q<level>:<lane>` is set once
-- KEYS[4] ql:{m}                set of "<level>:<lane>"; gets the lane when it is new
-- KEYS[5] f:{m}                 facts stream; gets LaneOpened when the lane is new
-- KEYS[6] n:{m}:<tenant>        hash of the tenant (n:{m} for none); `requests` and `bytes` grow
-- KEYS[7] j:{m}                 journal; gets an `accepted` fact if journalled
-- KEYS[8] ja:{m}                active jobs: id -> time accepted; gets the job
-- KEYS[9] job:{m}:<id>          hash; the job's record
-- KEYS[10] idem:{m}:<key>       digest of the request and id of its job, 16 bytes each (only given with a key). Without
--                               expiry while the job is active, then it ends with the job's record.
-- Written besides, by name: ja:{m}:x, active jobs with a deadline: id -> deadline; gets the job when it has one. And
-- ja:{m}:<level>:<lane>, of any but 0:0: those of ja:{m} that wait there; gets the job.
-- Read besides, by name: job:{m}:<id> of the job that a known key stands for.
--
-- ARGV[1] most unsettled requests, ARGV[2] most unsettled bytes, ARGV[3] and ARGV[4] the tenant's; 0 = no bound
-- ARGV[5] bytes of the request
-- ARGV[6] "<level>:<lane>"
-- ARGV[7] the packed LaneOpened fact
-- ARGV[8] the job's id
-- ARGV[9] name of its group, ARGV[10] its value
-- ARGV[11] the microsecond it was accepted at
-- ARGV[12] digest of the request
-- ARGV[13] the packed `accepted` fact, "" if it is not journalled
-- ARGV[14] how many arguments the record's fields take
-- then the record's fields: name, value, ... (a deadline, `x`, is the last of them), then the fields of the entry: name, value, ...
--
-- Returns 0, or 6 when the model is not yet known to have jobs (`jobs` of n:{m}: the gateway sets it after adding the model
-- to `jm`, which is in another slot); or the bound that would be passed: 1 requests, 2 bytes, 3 and 4 those of the tenant; or for a known
-- key the id of its job, or 5 when that one was of another request.

--#include admit.lua
--#include job_events.lua

if KEYS[10] then
  local known = redis.call('GET', KEYS[10])
  if known then
    local id = string.sub(known, 17)
    if redis.call('EXISTS', job_in_slot(string.sub(KEYS[3], 3), id)) == 1 then
      return string.sub(known, 1, 16) == ARGV[12] and id or 5
    end
  end
end

local bound, requests, size, lane = over(KEYS[3], 1, ARGV[5], ARGV[1], ARGV[2], 'q' .. ARGV[6])
if bound then
  return bound
end
local tenant_requests, tenant_size
if KEYS[6] ~= KEYS[3] then
  bound, tenant_requests, tenant_size = over(KEYS[6], 1, ARGV[5], ARGV[3], ARGV[4], '')
  if bound then
    return bound + 2
  end
end

if not add_groups(KEYS[2], 9, 1) then
  return CONFLICT
end
redis.call('HSET', KEYS[3], 'requests', requests, 'bytes', string.format('%.0f', size))
local entry = 15 + tonumber(ARGV[14])
redis.call('HSET', KEYS[9], unpack(ARGV, 15, entry - 1))
redis.call('ZADD', KEYS[8], ARGV[11], ARGV[8])
if ARGV[6] ~= '0:0' then
  redis.call('ZADD', KEYS[8] .. ':' .. ARGV[6], ARGV[11], ARGV[8])
end
if ARGV[entry - 2] == 'x' then
  redis.call('ZADD', KEYS[8] .. ':x', ARGV[entry - 1], ARGV[8])
end
if KEYS[10] then
  redis.call('SET', KEYS[10], ARGV[12] .. ARGV[8])
end
redis.call('XADD', KEYS[1], '*', unpack(ARGV, entry))
if not lane then
  redis.call('HSET', KEYS[3], 'q' .. ARGV[6], '')
  redis.call('SADD', KEYS[4], ARGV[6])
  redis.call('XADD', KEYS[5], '*', 'e', ARGV[7])
end
if tenant_requests then
  redis.call('HSET', KEYS[6], 'requests', tenant_requests, 'bytes', string.format('%.0f', tenant_size))
end
if ARGV[13] ~= '' then
  redis.call('XADD', KEYS[7], '*', 'f', ARGV[13])
end
return redis.call('HEXISTS', KEYS[3], 'jobs') == 1 and 0 or 6
