#!lua flags=allow-oom
-- Forget ended jobs whose records have expired.
--
-- KEYS[1] jd:{m}  ended jobs: id and counted size -> time ended; loses the members given
-- KEYS[2] n:{m}   hash; `kept` shrinks by their sizes
-- KEYS[3..] job:{m}:<id>, the records of the members, in their order: one that exists keeps its member (read only)
--
-- ARGV the members
--
-- Returns how many were forgotten.

local forgotten = 0
for i = 1, #ARGV do
  if redis.call('EXISTS', KEYS[2 + i]) == 0 and redis.call('ZREM', KEYS[1], ARGV[i]) == 1 then
    redis.call('HINCRBY', KEYS[2], 'kept', -tonumber(string.sub(ARGV[i], 17)))
    forgotten = forgotten + 1
  end
end
return forgotten
