#!lua flags=allow-oom
-- Stop owning a model; nothing happens when another has taken it.
--
-- KEYS[1] n:{m}  hash; `owner` is removed, `token` stays so that tokens keep growing
--
-- ARGV[1] incarnation that gives the model up
-- ARGV[2] the token it was given
--
-- Returns 1 when it was the owner, else 0.

local lease = redis.call('HMGET', KEYS[1], 'owner', 'token')
if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then
  return 0
end
return redis.call('HDEL', KEYS[1], 'owner')
