#!lua flags=allow-oom
-- Become the owner of a model, if its owner still is the one the caller saw.
--
-- KEYS[1] n:{m}  hash; `owner` is compared and set, `token` counts the changes of owner, from the first one's time in
--                seconds on, and never goes back
--
-- ARGV[1] incarnation that wants to own the model
-- ARGV[2] incarnation that owned it when the caller looked, "" for none
--
-- Returns the new token, or 0 when the owner is another one.

if (redis.call('HGET', KEYS[1], 'owner') or '') ~= ARGV[2] then
  return 0
end
redis.call('HSET', KEYS[1], 'owner', ARGV[1])
-- in a log that was flushed a token of before must not come again: a process that has slept through it may hold one
redis.call('HSETNX', KEYS[1], 'token', redis.call('TIME')[1])
return redis.call('HINCRBY', KEYS[1], 'token', 1)
