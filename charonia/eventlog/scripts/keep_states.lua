#!lua flags=allow-oom
-- Write the states of sequences of one model, each only while its record is the one that the caller wrote last.
--
-- KEYS[1] sl:{m}  live sequences
-- KEYS[2] st:{m}  their states; get some
--
-- ARGV: key, record and state of each
--
-- Returns 1 for each that was written, else 0.

local written = {}
for i = 1, #ARGV, 3 do
  local is_last = redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[i + 1]
  if is_last then
    redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 2])
  end
  written[#written + 1] = is_last and 1 or 0
end
return written
