#!lua flags=allow-oom
-- Delete journal entries past the model's retention, the oldest first.
--
-- KEYS[1] j:{m}        journal stream; loses entries
-- KEYS[2] n:{m}        hash; `keep_journal_s` and `keep_journal_bytes` are what may be kept, 0 or nothing = all; gets
--                      `journal_trimmed` with the first deletion
-- KEYS[3] j:{m}:seals  seals of the journal; what one covers is deleted as a whole or not at all. Loses those before the
--                      last one whose entries are gone, with which the chain then begins
--
-- ARGV[1] id of the oldest entry that must stay, or + for none
-- ARGV[2] how many entries to look at: more than these are told from the times of the first and the last one
-- ARGV[3] 1 when nothing may be deleted that no seal covers, else 0
--
-- Returns how many were deleted.

-- what a node of a stream holds at most, as servers have it unless configured (stream-node-max-bytes and -entries)
local NODE_BYTES, NODE_ENTRIES = 4096, 100

local bound_ms, bound_sequence = string.match(ARGV[1], '^(%d+)-(%d+)$')
bound_ms, bound_sequence = tonumber(bound_ms), tonumber(bound_sequence)

-- Delete what is older than an id, and nothing that must stay.
local function trim(ms, sequence)
  if bound_ms and (ms > bound_ms or (ms == bound_ms and sequence > bound_sequence)) then
    ms, sequence = bound_ms, bound_sequence
  end
  local oldest_kept = string.format('%.0f-%.0f', ms, sequence)
  local seal = redis.call('XREVRANGE', KEYS[3], '(' .. oldest_kept, '-', 'COUNT', 1)[1]
  local begun = ARGV[3] == '1' or redis.call('XRANGE', KEYS[3], oldest_kept, '+', 'COUNT', 1)[1]
  if seal then
    redis.call('XTRIM', KEYS[3], 'MINID', '=', seal[1])
  end
  if not begun then
    return redis.call('XTRIM', KEYS[1], 'MINID', '=', oldest_kept)
  elseif not seal then
    return 0
  end
  local seal_ms, seal_sequence = string.match(seal[1], '^(%d+)-(%d+)$')
  return redis.call('XTRIM', KEYS[1], 'MINID', '=', string.format('%s-%.0f', seal_ms, tonumber(seal_sequence) + 1))
end

local function id_of(entry)
  local ms, sequence = string.match(entry[1], '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(sequence)
end

local keep = redis.call('HMGET', KEYS[2], 'keep_journal_s', 'keep_journal_bytes')
local keep_s, keep_bytes = tonumber(keep[1] or 0), tonumber(keep[2] or 0)
local gone = 0
if keep_s > 0 then
  local now = redis.call('TIME')
  gone = trim(now[1] * 1000 + math.floor(now[2] / 1000) - keep_s * 1000, 0)
end
local length = redis.call('XLEN', KEYS[1])
local size = keep_bytes > 0 and length > 0 and redis.call('MEMORY', 'USAGE', KEYS[1]) or 0
if size > keep_bytes then
  -- what is too much is told from the average entry; the server frees whole nodes, so no less than about one goes
  local entry_bytes = size / length
  local in_node = math.min(NODE_ENTRIES, math.ceil(NODE_BYTES / entry_bytes))
  local excess = math.min(length, math.max(in_node, math.ceil((size - keep_bytes) / entry_bytes)))
  if excess <= tonumber(ARGV[2]) then
    local oldest = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', excess)
    local ms, sequence = id_of(oldest[#oldest])
    gone = gone + trim(ms, sequence + 1)
  else
    local first = id_of(redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1])
    local last = id_of(redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1])
    gone = gone + trim(first + math.max(1, math.floor((last - first) * excess / length)), 0)
  end
end
if gone > 0 then
  redis.call('HSET', KEYS[2], 'journal_trimmed', '1')
end
return gone
