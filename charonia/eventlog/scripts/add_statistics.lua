#!lua
-- Add to the statistics of one incarnation of a model version.
--
-- KEYS[1] s:{m}:<version>:<hash> statistics hash; sums grow, maxima are raised
--
-- ARGV[1] how many of the statistics are sums; those after them are maxima of non-negative integers
-- then the statistics: field, value, ...

local maxima = 2 + 2 * tonumber(ARGV[1])
for i = 2, maxima - 1, 2 do
  redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1])
end
for i = maxima, #ARGV, 2 do
  -- compared as digits: a Lua number cannot hold every nanosecond
  local old, new = redis.call('HGET', KEYS[1], ARGV[i]) or '', ARGV[i + 1]
  if #new > #old or (#new == #old and new > old) then
    redis.call('HSET', KEYS[1], ARGV[i], new)
  end
end
return 1
