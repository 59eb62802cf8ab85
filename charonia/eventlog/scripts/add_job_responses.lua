#!lua
-- Keep responses of a running job whose model answers more than once. Refused when the server is out of memory: the model
-- waits then.
--
-- KEYS[1] jr:{m}:<id>   stream; gets an entry `<index + 1>-0` for each response above those it has
-- KEYS[2] job:{m}:<id>  hash; `g` becomes one above the last index kept, `f` grows by their bytes
--
-- ARGV[1] the attempt
-- ARGV[2] the index of the first
-- then the response records, in order
--
-- Returns 1, or 0 when the job has ended, is unknown or has begun a later attempt.

local job = redis.call('HMGET', KEYS[2], 's', 'a', 'g')
if (job[1] ~= 'q' and job[1] ~= 'r') or tonumber(job[2] or 0) > tonumber(ARGV[1]) then
  return 0
end
local next_index, size = tonumber(job[3] or 0), 0
for i = 3, #ARGV do
  local index = ARGV[2] + i - 3
  if index >= next_index then
    redis.call('XADD', KEYS[1], string.format('%.0f-0', index + 1), 'a', ARGV[1], 'r', ARGV[i])
    next_index, size = index + 1, size + #ARGV[i]
  end
end
if size > 0 then
  redis.call('HSET', KEYS[2], 'g', string.format('%.0f', next_index))
  redis.call('HINCRBY', KEYS[2], 'f', string.format('%.0f', size))
end
return 1
