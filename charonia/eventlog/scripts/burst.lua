#!lua flags=allow-oom
-- Replace a wave by an entry that carries its requests one by one, unless it was settled or replaced before. Allowed
-- when the server is out of memory: what was accepted must be able to end.
--
-- KEYS[1] q:{m}:<level>:<lane>  stream; loses the wave's entry, gets one with the requests
-- KEYS[2] u:{m}                 hash of unsettled requests in groups (see group_values.lua); gets them as one group
-- KEYS[3] n:{m}                 hash; `requests` and `bytes` grow
-- KEYS[4] n:{m}:<tenant>        hash of the tenant, if there is one; likewise
--
-- ARGV[1] id of the wave's entry
-- ARGV[2] how many requests
-- ARGV[3] their bytes together
-- ARGV[4] name of the group
-- ARGV[5] value of the group
-- then the fields of the entry: name, value, ...
--
-- Returns the id of the new entry, or "".

if redis.call('XDEL', KEYS[1], ARGV[1]) == 0 then
  return ''
end
redis.call('HSETNX', KEYS[2], ARGV[4], ARGV[5])
for k = 3, #KEYS do
  redis.call('HINCRBY', KEYS[k], 'requests', ARGV[2])
  redis.call('HINCRBY', KEYS[k], 'bytes', ARGV[3])
end
return redis.call('XADD', KEYS[1], '*', unpack(ARGV, 6))
