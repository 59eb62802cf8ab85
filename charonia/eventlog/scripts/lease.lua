#!lua flags=allow-oom
-- Reserve room under a model's bounds for the waves of one gateway, in place of what it had reserved before.
--
-- KEYS[1] n:{m}   hash; `lease:<holder>` is set or removed, `leased_requests` and `leased_bytes` change by the difference
--
-- ARGV[1] the holder
-- ARGV[2] how many requests, ARGV[3] how many bytes; 0 and 0 end the lease
-- ARGV[4] most requests, ARGV[5] most bytes of the model, 0 = no bound
--
-- Returns 1, or 0 when a bound would be passed: then nothing has changed.

local field = 'lease:' .. ARGV[1]
local now = redis.call('HMGET', KEYS[1], field, 'requests', 'bytes', 'leased_requests', 'leased_bytes')
local held_requests, held_bytes = 0, 0
if now[1] then
  held_requests, held_bytes = string.match(now[1], '^(%d+):(%d+)$')
elseif ARGV[2] == '0' and ARGV[3] == '0' then
  return 1
end
local more_requests, more_bytes = ARGV[2] - held_requests, ARGV[3] - held_bytes
local requests, bytes = (now[4] or 0) + more_requests, (now[5] or 0) + more_bytes
local most_requests, most_bytes = tonumber(ARGV[4]), tonumber(ARGV[5])
if more_requests > 0 and most_requests > 0 and requests + (now[2] or 0) > most_requests then
  return 0
elseif more_bytes > 0 and most_bytes > 0 and bytes + (now[3] or 0) > most_bytes then
  return 0
end
if ARGV[2] == '0' and ARGV[3] == '0' then
  redis.call('HDEL', KEYS[1], field)
else
  redis.call('HSET', KEYS[1], field, ARGV[2] .. ':' .. ARGV[3])
end
redis.call('HSET', KEYS[1], 'leased_requests', string.format('%.0f', requests), 'leased_bytes',
  string.format('%.0f', bytes))
return 1
