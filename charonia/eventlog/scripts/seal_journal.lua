#!lua flags=allow-oom
-- Append a seal if the last one is the one that its maker has seen: so two makers never fork the chain. Allowed when the
-- server is out of memory: what is sealed may be trimmed.
--
-- KEYS[1] j:{m}:seals  stream; gets the seal
--
-- ARGV[1] id of the last seal, 0-0 for none
-- ARGV[2] id of the new seal: that of the last journal entry it covers
-- ARGV[3] its bytes (charonia.facts.seals)
--
-- Returns 1, or 0 when the last seal is another one, or a seal at or after this id was deleted.

local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if (last and last[1] or '0-0') ~= ARGV[1] then
  return 0
end
local added = redis.pcall('XADD', KEYS[1], ARGV[2], 's', ARGV[3])
if type(added) == 'table' and added.err then
  if string.find(added.err, 'equal or smaller', 1, true) then
    return 0
  end
  return added
end
return 1
