#!lua flags=allow-oom
-- Delete journal entries past the model's retention; a bounded number, the oldest first.
--
-- KEYS[1] j:{m}  journal stream; loses entries
-- KEYS[2] n:{m}  hash; `keep_journal_s` and `keep_journal_bytes` are what may be kept, 0 or nothing = all; gets
--                `journal_trimmed` with the first deletion
--
-- ARGV[1] id of the oldest entry that must stay, or + for none
-- ARGV[2] how many entries to delete at most
--
-- Returns how many were deleted.

local keep = redis.call('HMGET', KEYS[2], 'keep_journal_s', 'keep_journal_bytes')
local keep_s, keep_bytes = tonumber(keep[1] or 0), tonumber(keep[2] or 0)
local length, most = redis.call('XLEN', KEYS[1]), tonumber(ARGV[2])
if length == 0 then
  return 0
end

-- what is too much is told from the average entry
local excess = 0
if keep_bytes > 0 then
  local size = redis.call('MEMORY', 'USAGE', KEYS[1])
  if size > keep_bytes then
    excess = math.ceil((size - keep_bytes) / size * length)
  end
end
local expired_ms = 0
if keep_s > 0 then
  local now = redis.call('TIME')
  expired_ms = now[1] * 1000 + math.floor(now[2] / 1000) - keep_s * 1000
end

local bound_ms, bound_sequence = string.match(ARGV[1], '^(%d+)-(%d+)$')
bound_ms, bound_sequence = tonumber(bound_ms), tonumber(bound_sequence)
local gone, after = 0, '-'
while gone < most do
  local going = {}
  for _, entry in ipairs(redis.call('XRANGE', KEYS[1], after, '+', 'COUNT', math.min(500, most - gone))) do
    local ms, sequence = string.match(entry[1], '^(%d+)-(%d+)$')
    ms, sequence = tonumber(ms), tonumber(sequence)
    local bounded = bound_ms and (ms > bound_ms or (ms == bound_ms and sequence >= bound_sequence))
    if bounded or (gone + #going >= excess and ms >= expired_ms) then
      break
    end
    going[#going + 1] = entry[1]
  end
  if #going == 0 then
    break
  end
  gone = gone + redis.call('XDEL', KEYS[1], unpack(going))
  after = '(' .. going[#going]
end
if gone > 0 then
  redis.call('HSET', KEYS[2], 'journal_trimmed', '1')
end
return gone
