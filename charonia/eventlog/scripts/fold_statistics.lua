-- Included by settle.lua, settle_recorded.lua, end_waves.lua and add_statistics.lua: add statistics to a hash.
--
-- key      s:{m}:<version>:<hash>, one of the including script's KEYS
-- at       the ARGV index of the first statistic's name; the names are followed by as many values, to the end of ARGV
-- sums     how many of them are sums, the others are maxima: they keep the largest value; or "run", then the names are
--          one, `run:<rows>`, and its value is what one execution adds, packed (charonia.eventlog.redis.stored_records)
--
-- One HMGET and one HSET instead of a HINCRBY for each sum, which costs the server a third of a settle. A Lua number
-- holds 15 digits: longer sums are left to HINCRBY, and maxima are compared as digits (non-negative integers only).
-- Those of a run, which nearly every settle adds, stay packed, a tenth of what they cost one by one: the sums of them
-- are those of the hash's own fields and of all its runs, the maxima likewise.
-- pcall: what was settled before must not be hidden by statistics that cannot be kept; returns the first error or nil.
local PACKED, SUMS = '<ddddddddddddddddd', 16

local function fold_run(key, field, value)
  local HIGHEST = 4503599627370496
  local known = redis.pcall('HGET', key, field)
  if type(known) == 'table' then
    return known
  end
  if known then
    local totals, added, high = {struct.unpack(PACKED, known)}, {struct.unpack(PACKED, value)}, false
    for k = 1, SUMS do
      totals[k] = totals[k] + added[k]
      high = high or totals[k] > HIGHEST
    end
    if high then -- a number holds no more exactly: what was there moves to fields of its own (names: counters.py)
      local names = {'success_count', 'success_ns', 'queue_count', 'queue_ns', 'compute_input_count',
        'compute_input_ns', 'compute_infer_count', 'compute_infer_ns', 'compute_output_count', 'compute_output_ns',
        'inference_count', 'execution_count', '_count', '_input_ns', '_infer_ns', '_output_ns'}
      for k = 1, SUMS do
        local name = k > 12 and 'b' .. string.sub(field, 5) .. names[k] or names[k]
        local result = redis.pcall('HINCRBY', key, name, string.format('%.0f', totals[k] - added[k]))
        if type(result) == 'table' then
          return result
        end
        totals[k] = added[k]
      end
    end
    totals[SUMS + 1] = math.max(totals[SUMS + 1], added[SUMS + 1])
    totals[SUMS + 2] = nil -- where the unpacking ended
    value = struct.pack(PACKED, unpack(totals))
  end
  local result = redis.pcall('HSET', key, field, value)
  return type(result) == 'table' and result or nil
end

local function fold_statistics(key, at, sums)
  if sums == 'run' then
    return fold_run(key, ARGV[at], ARGV[at + 1])
  end
  sums = tonumber(sums)
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

-- Take from the statistics, which begin and are as for fold_statistics, so many successful requests and their rows; of the
-- times, all requests have the same share (charonia.facts.counters.without).
local function leave_out(at, sums, requests, rows)
  local function less(amount, part)
    return math.max(0, amount - part)
  end
  if sums == 'run' then
    local totals = {struct.unpack(PACKED, ARGV[at + 1])}
    totals[SUMS + 2] = nil -- where the unpacking ended
    local total = math.max(1, totals[1])
    for k = 1, 9, 2 do
      totals[k], totals[k + 1] = less(totals[k], requests), math.floor(totals[k + 1] * less(total, requests) / total)
    end
    totals[11] = less(totals[11], rows)
    ARGV[at + 1] = struct.pack(PACKED, unpack(totals))
    return
  end
  local count, total = (#ARGV - at + 1) / 2, 1
  local shared = {success = 1, queue = 1, compute_input = 1, compute_infer = 1, compute_output = 1}
  for k = at, at + count - 1 do
    if ARGV[k] == 'success_count' then
      total = math.max(1, tonumber(ARGV[k + count]))
    end
  end
  for k = at, at + count - 1 do
    local amount, what, unit = tonumber(ARGV[k + count]), string.match(ARGV[k], '^(.*)_(%a+)$')
    if ARGV[k] == 'inference_count' then
      amount = less(amount, rows)
    elseif shared[what] and unit == 'count' then
      amount = less(amount, requests)
    elseif shared[what] and unit == 'ns' then
      amount = math.floor(amount * less(total, requests) / total)
    else
      amount = nil
    end
    if amount then
      ARGV[k + count] = string.format('%.0f', amount)
    end
  end
end

-- Add the statistics of those requests that a mask says were won. `rows` are those of each request, or one number for
-- all; "" when not all of them succeeded: then the caller counts.
local function fold_won(key, at, sums, mask, rows)
  local _, won = string.gsub(mask, '1', '')
  if rows == '' or won == 0 then
    return
  end
  local each, lost_rows, number = tonumber(rows), 0, 0
  if each then
    lost_rows = each * (#mask - won)
  else
    for one in string.gmatch(rows, '%d+') do
      number = number + 1
      if string.byte(mask, number) ~= 49 then
        lost_rows = lost_rows + tonumber(one)
      end
    end
  end
  leave_out(at, sums, #mask - won, lost_rows)
  fold_statistics(key, at, sums)
end
