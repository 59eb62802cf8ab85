#!lua flags=allow-oom
-- Append an entry to a stream, unless a larger token has been used with its fence.
--
-- KEYS[1] the stream; gets an entry where there are fields
-- KEYS[2] its fence, a string: the largest token that was used with it
--
-- ARGV[1] the caller's token
-- ARGV[2] how long the fence is kept from now on, in seconds
-- then names and values of the entry; none only raises the fence
--
-- Returns 1, or 0 when a larger token has been used.

if tonumber(ARGV[1]) < tonumber(redis.call('GET', KEYS[2]) or 0) then
  return 0
end
redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[2])
if #ARGV > 2 then
  redis.call('XADD', KEYS[1], '*', unpack(ARGV, 3))
end
return 1
