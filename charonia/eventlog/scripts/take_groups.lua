-- Included by settle.lua and settle_recorded.lua: end requests, count them out, say which were won.
--
-- unsettled  u:{m}; a request won is marked in its group's value, a group without others is deleted
-- counters   n:{m}; `requests` and `bytes` shrink by what was won, and so do those of n:{m}:<tenant>, which is deleted
--            with its last request (the tenants are named in the values). `tk` says that requests may have progress:
--            then tk:{m}:<id> of each that was won is deleted, and its id leaves tk:{m}
-- at         the ARGV index of the first group name; `groups` names are followed by as many strings of last bytes
-- attempts   one number for all requests, or one for each, comma separated
--
-- Returns nil when all requests were won, else a string with "1" (won) or "0" for each.

-- take_members: members one by one. Returns the value that is left, nil for none, and whatever was won.
local function take_members(value, lasts, attempt_of)
  local marks, places, cut = marks_of(value)
  local n = #marks
  local tail = places and cut + n + 1 or cut + 1
  local sizes = {}
  for size in string.gmatch(string.match(value, '^[%d,]+', tail), '%d+') do
    sizes[#sizes + 1] = tonumber(size)
  end
  local mask, requests, freed = {}, 0, 0
  for i = 1, #lasts do
    local last = string.byte(lasts, i)
    local place = last + 1
    if places then
      place = places[last]
    end
    local mark = place and marks[place]
    if mark and mark ~= 46 and mark - 128 <= attempt_of(i) then
      marks[place] = 46
      requests = requests + 1
      freed = freed + (sizes[place + 1] or sizes[1] / n)
      mask[i] = '1'
    else
      mask[i] = '0'
    end
  end
  local left = nil
  for place = 1, n do
    if marks[place] ~= 46 then
      left = string.char(unpack(marks)) .. string.sub(value, cut)
      break
    end
  end
  return left, table.concat(mask), requests, freed, string.match(value, ':(.+)$', tail)
end

-- Delete the progress of the requests won, all of them without a mask (see append_progress.lua).
local function drop_progress(counters, at, groups, mask)
  local index = 'tk:' .. string.sub(counters, 3)
  local ids, names, number = {}, {}, 0
  for k = 0, groups - 1 do
    local name, lasts = ARGV[at + k], ARGV[at + groups + k]
    for i = 1, #lasts do
      number = number + 1
      if not mask or string.byte(mask, number) == 49 then
        local id = name .. string.sub(lasts, i, i)
        ids[#ids + 1] = id
        names[#names + 1] = index .. ':' .. string.gsub(id, '.', function(char)
          return string.format('%02x', string.byte(char))
        end)
      end
    end
  end
  for from = 1, #ids, 4000 do
    local to = math.min(from + 3999, #ids)
    if redis.call('SREM', index, unpack(ids, from, to)) > 0 then
      redis.call('UNLINK', unpack(names, from, to))
    end
  end
end

-- Returns whether requests of the model may have progress.
-- Reading both numbers and writing them back is one effect to be replicated and kept, not two.
local function count_out(counters, requests, freed, tenant)
  local now = redis.call('HMGET', counters, 'requests', 'bytes', 'tk')
  local progress = now[3]
  redis.call('HSET', counters, 'requests', (now[1] or 0) - requests, 'bytes', (now[2] or 0) - freed)
  if tenant then
    local key = counters .. ':' .. tenant
    now = redis.call('HMGET', key, 'requests', 'bytes')
    if (now[1] or 0) - requests <= 0 then
      redis.call('DEL', key)
    else
      redis.call('HSET', key, 'requests', (now[1] or 0) - requests, 'bytes', (now[2] or 0) - freed)
    end
  end
  return progress
end

local function take_groups(unsettled, counters, at, groups, attempts)
  local attempt = tonumber(attempts)
  if groups == 1 and attempt then
    -- what nearly every batch is
    local value = redis.call('HGET', unsettled, ARGV[at])
    local rest = value and whole(value, ARGV[at + 1], attempt)
    if rest then
      local size, tenant = tonumber(rest), nil
      if not size then
        size, tenant = tonumber(string.match(rest, '^%d+')), string.match(rest, ':(.+)$')
      end
      redis.call('HDEL', unsettled, ARGV[at])
      if count_out(counters, #ARGV[at + 1], size, tenant) then
        drop_progress(counters, at, groups, nil)
      end
      return nil
    end
  end

  local several = nil
  if not attempt then
    several = {}
    for one in string.gmatch(attempts, '%d+') do
      several[#several + 1] = tonumber(one)
    end
  end
  local gone, changed, masks, tenants = {}, {}, {}, {}
  local seen, won = 0, 0
  for from = 0, groups - 1, 4000 do -- unpack() has a bounded stack
    local to = math.min(from + 3999, groups - 1)
    local known = redis.call('HMGET', unsettled, unpack(ARGV, at + from, at + to))
    for k = from, to do
      local value, lasts = known[k - from + 1], ARGV[at + groups + k]
      local count, size, tenant = 0, 0, nil
      local rest = value and attempt and whole(value, lasts, attempt)
      if rest then
        count, size = #lasts, tonumber(rest)
        if not size then
          size, tenant = tonumber(string.match(rest, '^%d+')), string.match(rest, ':(.+)$')
        end
        gone[#gone + 1] = ARGV[at + k]
      elseif value then
        local left
        left, masks[k], count, size, tenant = take_members(value, lasts, function(i)
          return attempt or several[seen + i]
        end)
        if count > 0 and left then
          changed[#changed + 1] = ARGV[at + k]
          changed[#changed + 1] = left
        elseif count > 0 then
          gone[#gone + 1] = ARGV[at + k]
        end
      else
        masks[k] = string.rep('0', #lasts)
      end
      seen, won = seen + #lasts, won + count
      if count > 0 then
        tenant = tenant or ''
        local taken = tenants[tenant] or {0, 0}
        tenants[tenant] = {taken[1] + count, taken[2] + size}
      end
    end
  end

  for from = 1, #gone, 4000 do
    redis.call('HDEL', unsettled, unpack(gone, from, math.min(from + 3999, #gone)))
  end
  for from = 1, #changed, 4000 do
    redis.call('HSET', unsettled, unpack(changed, from, math.min(from + 3999, #changed)))
  end
  local progress = nil
  for tenant, taken in pairs(tenants) do
    progress = count_out(counters, taken[1], taken[2], tenant ~= '' and tenant or nil)
  end
  local mask = won < seen and joined_masks(masks, at, groups) or nil
  if progress then
    drop_progress(counters, at, groups, mask)
  end
  return mask
end
