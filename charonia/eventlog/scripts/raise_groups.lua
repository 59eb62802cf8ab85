-- Included by scripts that begin attempts: raise the attempt of requests, never lower it; say who is unsettled.
--
-- unsettled  u:{m}, in groups (see group_values.lua)
-- at         the ARGV index of the first group name; `groups` names are followed by as many strings of last bytes
--
-- Returns nil when all are unsettled, else a string with "1" (unsettled) or "0" for each.
local function raise_several(unsettled, at, groups, attempt, mark)
  local raised, masks, all = {}, {}, true

  -- Members one by one: the value with their attempts raised, nil if nothing changes, and who is unsettled.
  local function raise_members(value, lasts)
    local marks, places, cut = marks_of(value)
    local changed, known = false, {}
    for i = 1, #lasts do
      local last = string.byte(lasts, i)
      local place = last + 1
      if places then
        place = places[last]
      end
      local old = place and marks[place]
      if old and old ~= 46 then
        known[i] = '1'
        if old < mark then
          marks[place], changed = mark, true
        end
      else
        known[i], all = '0', false
      end
    end
    return changed and string.char(unpack(marks)) .. string.sub(value, cut), table.concat(known)
  end

  for from = 0, groups - 1, 4000 do
    local to = math.min(from + 3999, groups - 1)
    local known = redis.call('HMGET', unsettled, unpack(ARGV, at + from, at + to))
    for k = from, to do
      local value, lasts = known[k - from + 1], ARGV[at + groups + k]
      local left = nil
      if value and whole(value, lasts, attempt - 1) then
        left = string.rep(string.char(mark), #lasts) .. string.sub(value, #lasts + 1)
      elseif value then
        left, masks[k] = raise_members(value, lasts)
      else
        masks[k], all = string.rep('0', #lasts), false
      end
      if left then
        raised[#raised + 1] = ARGV[at + k]
        raised[#raised + 1] = left
      end
    end
  end
  for from = 1, #raised, 4000 do
    redis.call('HSET', unsettled, unpack(raised, from, math.min(from + 3999, #raised)))
  end
  if all then
    return nil
  end
  return joined_masks(masks, at, groups)
end

local function raise_groups(unsettled, at, groups, attempt)
  local mark = math.min(attempt, 127) + 128
  if groups == 1 then
    -- what nearly every batch is
    local value, lasts = redis.call('HGET', unsettled, ARGV[at]), ARGV[at + 1]
    if value and whole(value, lasts, attempt - 1) then
      value = string.rep(string.char(mark), #lasts) .. string.sub(value, #lasts + 1)
      redis.call('HSET', unsettled, ARGV[at], value)
      return nil
    end
  end
  return raise_several(unsettled, at, groups, attempt, mark)
end
