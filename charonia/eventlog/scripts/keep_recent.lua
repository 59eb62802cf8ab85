#!lua
-- Remember when members were last used and how large they are; take out the oldest while all are too large together.
--
-- KEYS[1] cu:{tag}        sorted set of members by last use in us since the epoch
-- KEYS[2] cu:{tag}:sizes  hash: member -> size in bytes; the empty field is their sum
--
-- ARGV[1] how many bytes all members may have
-- ARGV[2] how many members are taken out at most
-- ARGV[3] how many members are used; then for each: member, time, size (-1: only if known)
-- then members to forget first
--
-- Returns the members taken out because of the bound.

local used = tonumber(ARGV[3])
local total = tonumber(redis.call('HGET', KEYS[2], '') or 0)

for at = 4 + 3 * used, #ARGV do
  total = total - tonumber(redis.call('HGET', KEYS[2], ARGV[at]) or 0)
  redis.call('ZREM', KEYS[1], ARGV[at])
  redis.call('HDEL', KEYS[2], ARGV[at])
end
for at = 4, 3 + 3 * used, 3 do
  local member, size = ARGV[at], tonumber(ARGV[at + 2])
  if size < 0 then
    redis.call('ZADD', KEYS[1], 'XX', 'GT', ARGV[at + 1], member)
  else
    total = total + size - tonumber(redis.call('HGET', KEYS[2], member) or 0)
    redis.call('ZADD', KEYS[1], 'GT', ARGV[at + 1], member)
    redis.call('HSET', KEYS[2], member, size)
  end
end

local taken = {}
while total > tonumber(ARGV[1]) and #taken < tonumber(ARGV[2]) do
  local member = redis.call('ZPOPMIN', KEYS[1])[1]
  if not member then
    total = 0
    break
  end
  total = total - tonumber(redis.call('HGET', KEYS[2], member) or 0)
  redis.call('HDEL', KEYS[2], member)
  taken[#taken + 1] = member
end
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('HSET', KEYS[2], '', string.format('%.0f', total))
else
  redis.call('DEL', KEYS[2])
end
return taken
