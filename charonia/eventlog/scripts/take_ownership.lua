#!lua flags=allow-oom
-- Become the owner of a model, if its owner still is the one the caller saw.
--
-- KEYS[1] n:{m}  hash; `owner` is compared and set, `token` counts the changes of owner and never goes back
--
-- ARGV[1] incarnation that wants to own the model
-- ARGV[2] incarnation that owned it when the caller looked, "" for none
--
-- Returns the new token, or 0 when the owner is another one.

if (redis.call('HGET', KEYS[1], 'owner') or '') ~= ARGV[2] then
  return 0
end
redis.call('HSET', KEYS[1], 'owner', ARGV[1])
return redis.call('HINCRBY', KEYS[1], 'token', 1)
