#!lua
-- Record requests of one model, all or none: count each one and append the queue entry that carries them.
-- Refused as a whole when the server is out of memory (no allow-oom), so that no half is ever written.
--
-- KEYS[1] q:{m}:<level>:<lane>  stream; gets one entry with all fields
-- KEYS[2] u:{m}                 hash request id -> "<attempt>:<size_bytes>"; gets one field per request, attempt 0
-- KEYS[3] n:{m}                 hash; `bytes` grows by the payload of all requests
-- KEYS[4] ql:{m}                set of "<level>:<lane>"; gets the lane
-- KEYS[5] f:{m}                 facts stream; gets LaneOpened when the lane is new
--
-- ARGV[1] most unsettled requests, 0 = no bound
-- ARGV[2] most unsettled bytes, 0 = no bound
-- ARGV[3] bytes of these requests together
-- ARGV[4] "<level>:<lane>"
-- ARGV[5] the packed LaneOpened fact
-- ARGV[6] n, how many requests
-- then 2n arguments: request id, "0:<size_bytes>"
-- then the fields of the entry: name, value, ...
--
-- Returns 0, or the bound that would be passed: 1 requests, 2 bytes.

local limit = tonumber(ARGV[1])
local n = tonumber(ARGV[6])
if limit > 0 and redis.call('HLEN', KEYS[2]) + n > limit then
  return 1
end
limit = tonumber(ARGV[2])
if limit > 0 and tonumber(redis.call('HGET', KEYS[3], 'bytes') or 0) + tonumber(ARGV[3]) > limit then
  return 2
end

local last = 6 + 2 * n
for from = 7, last, 4000 do -- unpack() has a bounded stack
  redis.call('HSET', KEYS[2], unpack(ARGV, from, math.min(from + 3999, last)))
end
redis.call('HINCRBY', KEYS[3], 'bytes', ARGV[3])
redis.call('XADD', KEYS[1], '*', unpack(ARGV, last + 1))
if redis.call('SADD', KEYS[4], ARGV[4]) == 1 then
  redis.call('XADD', KEYS[5], '*', 'e', ARGV[5])
end
return 0
