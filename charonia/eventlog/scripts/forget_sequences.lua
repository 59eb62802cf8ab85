#!lua flags=allow-oom
-- Forget sequences of one model that are still the runs that the caller means.
--
-- KEYS[1] sl:{m}  live sequences; lose those
-- KEYS[2] st:{m}  their states, likewise
--
-- ARGV: key and run of each, in pairs

for i = 1, #ARGV, 2 do
  local about = redis.call('HGET', KEYS[1], ARGV[i])
  if about and string.sub(about, 1, #ARGV[i + 1]) == ARGV[i + 1] then
    redis.call('HDEL', KEYS[1], ARGV[i])
    redis.call('HDEL', KEYS[2], ARGV[i])
  end
end
return 1
