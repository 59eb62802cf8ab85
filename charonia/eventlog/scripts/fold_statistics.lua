-- Included by settle.lua and add_statistics.lua: add statistics to a hash.
--
-- key      s:{m}:<version>:<hash>, one of the including script's KEYS
-- at       the ARGV index of the first statistic's name; the names are followed by as many values, to the end of ARGV
-- sums     how many of them are sums; the others are maxima: they keep the largest value
--
-- One HMGET and one HSET instead of a HINCRBY for each sum, which costs the server a third of a settle. A Lua number
-- holds 15 digits: longer sums are left to HINCRBY, and maxima are compared as digits (non-negative integers only).
-- pcall: what was settled before must not be hidden by statistics that cannot be kept; returns the first error or nil.
local function fold_statistics(key, at, sums)
  local count = (#ARGV - at + 1) / 2
  if count == 0 then
    return nil
  end
  local known = redis.pcall('HMGET', key, unpack(ARGV, at, at + count - 1))
  if known.err then
    return known
  end
  local set, n, failed = {}, 0, nil
  for k = 1, count do
    local old, value = known[k] or '0', ARGV[at + count + k - 1]
    if k <= sums then
      local number = #old <= 15 and #value <= 15 and tonumber(old)
      if number then
        set[n + 1], set[n + 2], n = ARGV[at + k - 1], number + value, n + 2
      else
        local result = redis.pcall('HINCRBY', key, ARGV[at + k - 1], value)
        failed = failed or (type(result) == 'table' and result or nil)
      end
    elseif not known[k] or #value > #old or (#value == #old and value > old) then
      set[n + 1], set[n + 2], n = ARGV[at + k - 1], value, n + 2
    end
  end
  if n > 0 then
    local result = redis.pcall('HSET', key, unpack(set))
    failed = failed or (type(result) == 'table' and result or nil)
  end
  return failed
end
