#!lua flags=allow-oom
-- Add an event to a job that has not ended.
--
-- KEYS[1] job:{m}:<id>  hash; gets the event as `e<number>` and its number as `v`; `returned` makes it queued again
--
-- ARGV[1] kind
-- ARGV[2] kind and detail, packed one after the other
--
-- Returns 1, or 0 when the job has ended or is unknown.

--#include job_events.lua

local job = redis.call('HMGET', KEYS[1], 's', 'v')
if job[1] ~= 'q' and job[1] ~= 'r' then
  return 0
end
local last = (job[2] or 1) + 1
redis.call('HSET', KEYS[1], 'v', last, 'e' .. last, event(now_us(), ARGV[2]))
if ARGV[1] == 'returned' then
  redis.call('HSET', KEYS[1], 's', 'q')
end
return 1
