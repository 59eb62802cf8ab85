#!lua
-- Append to the progress of requests of one resumable model, each at its own place, unless it is settled or at a later
-- attempt: a lost executor's late records never enter. When all were taken, append entries of replies as well: they are
-- never seen without the records. Refused when the server is out of memory: the model waits then.
--
-- KEYS[1] u:{m}        hash of unsettled requests in groups (see group_values.lua); read only
-- KEYS[2] n:{m}        hash; `tk` says that requests of the model may have progress
-- KEYS[3] tk:{m}       set of the ids that have progress; gets those that begin
-- KEYS[4..] tk:{m}:<id> lists, one for each request; get the records
--
-- ARGV: for each request its id, the attempt, the index of its first record, how many records, and the records; then
-- for each entry of replies its stream r:<endpoint>, how many fields and values it has, and those. Streams are no KEYS:
-- an executor may write them but not read them, and scripts need both rights for their KEYS.
--
-- Returns a number for each request: how many records it has now, less than was given when some before them are missing
-- (then nothing was appended); -1 when it is settled, unknown or at a later attempt; -2 when the log has another record
-- at one of these places. Records that the log has already are not appended again. With entries of replies there is
-- one more number at the end: 1 when they were appended, 0 when not.

local MOST = 4000 -- unpack() has a bounded stack

-- The attempt that a member of a group is at, nil when it is not unsettled.
local function attempt_of(value, last)
  local cut = value and string.find(value, '[:;]')
  if not cut then
    return nil
  end
  local place = last + 1
  if string.byte(value, cut) == 59 then
    local found = string.find(string.sub(value, cut + 1, 2 * cut - 1), string.char(last), 1, true)
    place = found or cut
  end
  local mark = place < cut and string.byte(value, place)
  return mark and mark ~= 46 and mark - 128 or nil
end

local result, begun, at = {}, {}, 1
local name, value
local all = true
for k = 4, #KEYS do
  local id, attempt, index, count = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local group = string.sub(id, 1, -2)
  if group ~= name then
    name, value = group, redis.call('HGET', KEYS[1], group)
  end
  local current = attempt_of(value, string.byte(id, -1))
  local answer = -1
  if current and current <= attempt then
    local length = redis.call('LLEN', KEYS[k])
    answer = length
    local known = math.max(0, math.min(length - index, count))
    if known > 0 then
      local kept = redis.call('LRANGE', KEYS[k], index, index + known - 1)
      for i = 1, known do
        if kept[i] ~= ARGV[at + 3 + i] then
          answer = -2
        end
      end
    end
    if answer >= index and known < count then
      for from = at + 4 + known, at + 3 + count, MOST do
        answer = redis.call('RPUSH', KEYS[k], unpack(ARGV, from, math.min(from + MOST - 1, at + 3 + count)))
      end
      if length == 0 then
        begun[#begun + 1] = id
      end
    end
  end
  result[k - 3] = answer
  if answer < index + count then
    all = false
  end
  at = at + 4 + count
end
if #begun > 0 then
  redis.call('HSET', KEYS[2], 'tk', 1)
  for from = 1, #begun, MOST do
    redis.call('SADD', KEYS[3], unpack(begun, from, math.min(from + MOST - 1, #begun)))
  end
end
if at <= #ARGV then
  while all and at <= #ARGV do
    local count = tonumber(ARGV[at + 1])
    redis.call('XADD', ARGV[at], '*', unpack(ARGV, at + 2, at + 1 + count))
    at = at + 2 + count
  end
  result[#result + 1] = all and 1 or 0
end
return result
