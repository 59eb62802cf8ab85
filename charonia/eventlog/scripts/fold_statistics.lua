-- Included by settle.lua and add_statistics.lua: add statistics to a hash.
--
-- key      s:{m}:<version>:<hash>, one of the including script's KEYS
-- at       the ARGV index of the first statistic; from there to the end: field, value, ...
-- maxima   the ARGV index of the first maximum: those before it are sums, those from it on keep the largest value
--
-- One HMGET and one HSET instead of a HINCRBY for each sum, which costs the server a third of a settle. A Lua number
-- holds 15 digits: longer sums are left to HINCRBY, and maxima are compared as digits (non-negative integers only).
-- pcall: what was settled before must not be hidden by statistics that cannot be kept; returns the first error or nil.
local function fold_statistics(key, at, maxima)
  if at > #ARGV then
    return nil
  end
  local names, set, failed = {}, {}, nil
  for i = at, #ARGV, 2 do
    names[#names + 1] = ARGV[i]
  end
  local known = redis.pcall('HMGET', key, unpack(names))
  if known.err then
    return known
  end
  for k = 1, #names do
    local i = at + 2 * (k - 1)
    local old, value = known[k], ARGV[i + 1]
    if i < maxima then
      old = old or '0'
      if #old > 15 or #value > 15 or not tonumber(old) then
        local result = redis.pcall('HINCRBY', key, names[k], value)
        failed = failed or (type(result) == 'table' and result or nil)
      else
        set[#set + 1] = names[k]
        set[#set + 1] = string.format('%d', old + value)
      end
    elseif not old or #value > #old or (#value == #old and value > old) then
      set[#set + 1] = names[k]
      set[#set + 1] = value
    end
  end
  if #set > 0 then
    local result = redis.pcall('HSET', key, unpack(set))
    failed = failed or (type(result) == 'table' and result or nil)
  end
  return failed
end
