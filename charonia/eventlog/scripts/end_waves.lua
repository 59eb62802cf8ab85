#!lua flags=allow-oom
-- Settle executed waves of one model, and count them: of each wave, only who deletes it counts its requests. Allowed
-- when the server is out of memory: settling is what frees it.
--
-- KEYS[1] s:{m}:<version>:<hash>  statistics hash; grows by what the waves add that were there
-- Besides, by name: q:{m}:<level>:<lane>, streams in the same slot, which lose the waves' entries. As KEYS they would
-- have to be readable for executors, who may only delete there (infra/redis/users.acl.template).
--
-- ARGV[1] n, how many waves
-- then for each wave: its stream, id of its entry, how many of its requests succeeded, and the rows of those
-- then how many of the statistics are sums, those after them are maxima of non-negative integers; or "run"
-- then the statistics of all waves together: their names, then their values
--
-- Returns 1 when all were there, else a string with one character for each wave: "1" there, "0" not. When none was,
-- nothing is counted.

--#include fold_statistics.lua

-- Take from the statistics so many successful requests and their rows; of the times, all requests have the same share
-- (charonia.facts.counters.without).
local function leave_out(at, requests, rows)
  local function less(amount, part)
    return math.max(0, amount - part)
  end
  if ARGV[at] == 'run' then
    local sums = {struct.unpack(PACKED, ARGV[at + 2])}
    sums[SUMS + 2] = nil -- where the unpacking ended
    local total = math.max(1, sums[1])
    for k = 1, 9, 2 do
      sums[k], sums[k + 1] = less(sums[k], requests), math.floor(sums[k + 1] * less(total, requests) / total)
    end
    sums[11] = less(sums[11], rows)
    ARGV[at + 2] = struct.pack(PACKED, unpack(sums))
    return
  end
  local count, total = (#ARGV - at) / 2, 1
  local shared = {success = 1, queue = 1, compute_input = 1, compute_infer = 1, compute_output = 1}
  for k = at + 1, at + count do
    if ARGV[k] == 'success_count' then
      total = math.max(1, tonumber(ARGV[k + count]))
    end
  end
  for k = at + 1, at + count do
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

local n = tonumber(ARGV[1])
-- Of a slot that moves, a stream may be on the other server already: the script must fail before it has deleted any.
for at = 6, 4 * n - 2, 4 do
  if ARGV[at] ~= ARGV[at - 4] then
    redis.call('XDEL', ARGV[at], '0-0')
  end
end
local marks, gone, requests, rows = {}, 0, 0, 0
for i = 1, n do
  local at = 4 * i - 2
  if redis.call('XDEL', ARGV[at], ARGV[at + 1]) == 1 then
    marks[i] = '1'
  else
    marks[i], gone = '0', gone + 1
    requests, rows = requests + ARGV[at + 2], rows + ARGV[at + 3]
  end
end
local at = 4 * n + 2
if gone < n then
  if requests > 0 then
    leave_out(at, requests, rows)
  end
  fold_statistics(KEYS[1], at + 1, ARGV[at])
end
return gone == 0 and 1 or table.concat(marks)
