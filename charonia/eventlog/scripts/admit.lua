-- Included by accept.lua and accept_job.lua: check the bounds of a model and of a tenant, then count requests.
--
-- counters   n:{m}; `requests` and `bytes` grow
-- tenant     n:{m}:<tenant>; likewise, or n:{m} for no tenant
-- unsettled  u:{m}; gets the groups, whose values are explained in group_values.lua

-- Members of a group's value: last bytes, marks, sizes, tenant.
local function members(value)
  local cut = string.find(value, '[:;]')
  local n, tail, lasts = cut - 1, cut + 1, {}
  local explicit = string.byte(value, cut) == 59
  if explicit then
    tail = cut + n + 1
  end
  local sizes = {}
  for size in string.gmatch(string.match(value, '^[%d,]+', tail), '%d+') do
    sizes[#sizes + 1] = tonumber(size)
  end
  local found = {}
  for place = 1, n do
    local mark = string.byte(value, place)
    if mark ~= 46 then
      local last = explicit and string.byte(value, cut + place) or place - 1
      found[#found + 1] = {last, mark, sizes[place + 1] or sizes[1] / n}
    end
  end
  return found, string.match(value, ':(.+)$', tail)
end

-- Requests that join a group with others already unsettled; nil when they are of another tenant or known.
local function joined(value, more)
  local old, tenant = members(value)
  local new, other = members(more)
  if tenant ~= other then
    return nil
  end
  local known, marks, lasts, sizes, total = {}, {}, {}, {}, 0
  for _, of in ipairs({old, new}) do
    for _, member in ipairs(of) do
      if known[member[1]] then
        return nil
      end
      known[member[1]] = true
      marks[#marks + 1] = string.char(member[2])
      lasts[#lasts + 1] = string.char(member[1])
      sizes[#sizes + 1] = string.format('%d', member[3])
      total = total + member[3]
    end
  end
  return table.concat(marks) .. ';' .. table.concat(lasts) .. string.format('%.0f', total) .. ','
    .. table.concat(sizes, ',') .. (tenant and ':' .. tenant or '')
end

local CONFLICT = {err = 'CONFLICT request ids that are unsettled, or of another tenant'}

-- Groups beside others or as new ones; true unless they are in conflict, which is found before anything is written.
local function add_groups(unsettled, at, groups)
  if groups == 1 then
    if redis.call('HSETNX', unsettled, ARGV[at], ARGV[at + 1]) == 0 then
      local value = joined(redis.call('HGET', unsettled, ARGV[at]), ARGV[at + 1])
      if not value then
        return false
      end
      redis.call('HSET', unsettled, ARGV[at], value)
    end
    return true
  end
  local set = {}
  for k = 0, groups - 1 do
    local name, value = ARGV[at + 2 * k], ARGV[at + 2 * k + 1]
    local known = redis.call('HGET', unsettled, name)
    if known then
      value = joined(known, value)
      if not value then
        return false
      end
    end
    set[2 * k + 1], set[2 * k + 2] = name, value
  end
  for from = 1, #set, 4000 do -- unpack() has a bounded stack
    redis.call('HSET', unsettled, unpack(set, from, math.min(from + 3999, #set)))
  end
  return true
end

-- The bound that would be passed (1 requests, 2 bytes), or nil, requests, bytes, and the value of a third field.
-- Room that gateways have leased for their waves counts as used.
local function over(key, requests, size, most_requests, most_bytes, field)
  local now = redis.call('HMGET', key, 'requests', 'bytes', field, 'leased_requests', 'leased_bytes')
  requests, size = requests + (now[1] or 0), size + (now[2] or 0)
  most_requests, most_bytes = tonumber(most_requests), tonumber(most_bytes)
  if most_requests > 0 and requests + (now[4] or 0) > most_requests then
    return 1
  elseif most_bytes > 0 and size + (now[5] or 0) > most_bytes then
    return 2
  end
  return nil, requests, size, now[3]
end
