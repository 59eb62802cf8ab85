#!lua flags=allow-oom
-- Add an event to a job that has not ended.
--
-- KEYS[1] job:{m}:<id>  hash; gets the event as `e<number>` and its number as `v`; `returned` makes it queued again,
--                       `moved` tells where it waits from now on
-- KEYS[2] ja:{m}        active jobs, only given with `moved`: ja:{m}:<level>:<lane> loses and gets the job
--
-- ARGV[1] kind
-- ARGV[2] kind and detail, packed one after the other
-- ARGV[3] its id, ARGV[4] the level it moves to; its lane stays. Only given with `moved`.
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
elseif KEYS[2] then
  local old = redis.call('HGET', KEYS[1], 'l') or '0:0'
  local new = ARGV[4] .. string.match(old, ':%d+$')
  redis.call('ZREM', KEYS[2] .. ':' .. old, ARGV[3])
  if new ~= '0:0' then
    -- behind what waits there
    redis.call('ZADD', KEYS[2] .. ':' .. new, string.format('%.0f', now_us()), ARGV[3])
  end
  redis.call('HSET', KEYS[1], 'l', new)
end
return 1
