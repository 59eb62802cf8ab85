#!lua flags=allow-oom
-- Write down the level a job has reached. One that is gone already (a bound of bytes) does not come back as a record of
-- its level.
--
-- KEYS[1] job:{m}:<id>  hash of the job; `d` becomes the level
--
-- ARGV[1] the level
--
-- Returns whether the job is there, 0 or 1.

local known = redis.call('EXISTS', KEYS[1])
if known == 1 then
  redis.call('HSET', KEYS[1], 'd', ARGV[1])
end
return known
