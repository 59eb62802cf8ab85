#!lua flags=no-writes
-- How much accepted, unsettled work a model has: both numbers of one instant.
--
-- KEYS[1] u:{m}  hash of the unsettled requests; its length is their number (read only)
-- KEYS[2] n:{m}  hash; `bytes` of unsettled payload (read only)
--
-- Returns {requests, bytes}.

return {redis.call('HLEN', KEYS[1]), tonumber(redis.call('HGET', KEYS[2], 'bytes') or 0)}
