#!lua
-- Record requests of one model, all or none: count each one and append the queue entry that carries them.
-- Refused as a whole when the server is out of memory (no allow-oom), so that no half is ever written.
--
-- KEYS[1] q:{m}:<level>:<lane>  stream; gets one entry with all fields
-- KEYS[2] u:{m}                 hash of unsettled requests in groups (see group_values.lua); gets them, attempt 0
-- KEYS[3] n:{m}                 hash; `requests` and `bytes` grow, `q<level>:<lane>` is set once
-- KEYS[4] ql:{m}                set of "<level>:<lane>"; gets the lane when it is new
-- KEYS[5] f:{m}                 facts stream; gets LaneOpened when the lane is new
-- KEYS[6] n:{m}:<tenant>        hash of the tenant (n:{m} for none); `requests` and `bytes` grow
-- KEYS[7] j:{m}                 journal; gets an `accepted` fact if journalled. [6] and [7] are given only if needed.
--
-- ARGV[1] most unsettled requests, 0 = no bound
-- ARGV[2] most unsettled bytes, 0 = no bound
-- ARGV[3] how many requests
-- ARGV[4] their bytes together
-- ARGV[5] "<level>:<lane>"
-- ARGV[6] the packed LaneOpened fact
-- ARGV[7] how many groups
-- with KEYS[6], three more: ARGV[8] the tenant's most requests, ARGV[9] its most bytes, ARGV[10] the packed
-- `accepted` fact or ""
-- then the groups: name, value, ...
-- then the fields of the entry: name, value, ...
--
-- Returns 0, or the bound that would be passed: 1 requests, 2 bytes, 3 and 4 those of the tenant.

--#include admit.lua

local bound, requests, size, lane = over(KEYS[3], ARGV[3], ARGV[4], ARGV[1], ARGV[2], 'q' .. ARGV[5])
if bound then
  return bound
end
local at, tenant_requests, tenant_size = 8, nil, nil
if KEYS[6] then
  at = 11
  if KEYS[6] ~= KEYS[3] then
    bound, tenant_requests, tenant_size = over(KEYS[6], ARGV[3], ARGV[4], ARGV[8], ARGV[9], '')
    if bound then
      return bound + 2
    end
  end
end

local groups = tonumber(ARGV[7])
if not add_groups(KEYS[2], at, groups) then
  return CONFLICT
end
redis.call('HSET', KEYS[3], 'requests', requests, 'bytes', string.format('%.0f', size))
redis.call('XADD', KEYS[1], '*', unpack(ARGV, at + 2 * groups))
if not lane then
  redis.call('HSET', KEYS[3], 'q' .. ARGV[5], '')
  redis.call('SADD', KEYS[4], ARGV[5])
  redis.call('XADD', KEYS[5], '*', 'e', ARGV[6])
end
if tenant_requests then
  redis.call('HSET', KEYS[6], 'requests', tenant_requests, 'bytes', string.format('%.0f', tenant_size))
end
if KEYS[7] and ARGV[10] ~= '' then
  redis.call('XADD', KEYS[7], '*', 'f', ARGV[10])
end
return 0
