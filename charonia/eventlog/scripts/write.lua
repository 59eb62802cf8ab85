#!lua flags=allow-oom
-- Run one write command although the server is out of memory: for what ends work or keeps processes alive, once the
-- plain command was refused.
--
-- KEYS[1] whatever the command writes
--
-- ARGV[1] the command
-- then its arguments after the key (their number is bounded as in an entry: unpack() has a bounded stack)
--
-- Returns the command's reply.

return redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))
