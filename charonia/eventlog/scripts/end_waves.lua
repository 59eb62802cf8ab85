#!lua flags=allow-oom
-- Settle executed waves of one model, and count them: of each wave, only who deletes it counts its requests. Allowed
-- when the server is out of memory: settling is what frees it.
--
-- KEYS[1] s:{m}:<version>:<hash>  statistics hash; grows by what the waves add that were there
-- Besides, by name: q:{m}:<level>:<lane>, streams in the same slot, which lose the waves' entries. As KEYS they would
-- have to be readable for executors, who may only delete there (infra/redis/users.acl.template).
--
-- ARGV[1] how many streams
-- ARGV[2] how many requests of each wave succeeded, and the rows of those: numbers, comma separated
-- then for each stream: its name, how many of its waves end, and the ids of their entries
-- then how many of the statistics are sums, those after them are maxima of non-negative integers; or "run"
-- then the statistics of all waves together: their names, then their values
--
-- Returns 1 when all were there, else a string with one character for each wave: "1" there, "0" not. When none was,
-- nothing is counted.

--#include fold_statistics.lua

local streams, at, marks, gone = tonumber(ARGV[1]), 3, {}, {}
-- Of a slot that moves, a stream may be on the other server already: the script must fail before it has deleted any.
for _ = 2, streams do
  at = at + 2 + tonumber(ARGV[at + 1])
  redis.call('XDEL', ARGV[at], '0-0')
end
at = 3
for _ = 1, streams do
  local stream, last = ARGV[at], at + 1 + tonumber(ARGV[at + 1])
  for k = at + 2, last do
    if redis.call('XDEL', stream, ARGV[k]) == 1 then
      marks[#marks + 1] = '1'
    else
      marks[#marks + 1] = '0'
      gone[#gone + 1] = #marks
    end
  end
  at = last + 1
end
if #gone == 0 then
  fold_statistics(KEYS[1], at + 1, ARGV[at])
  return 1
end
if #gone < #marks then
  local numbers, requests, rows = {}, 0, 0
  for number in string.gmatch(ARGV[2], '%d+') do
    numbers[#numbers + 1] = tonumber(number)
  end
  for _, wave in ipairs(gone) do
    requests, rows = requests + numbers[2 * wave - 1], rows + numbers[2 * wave]
  end
  leave_out(at + 1, ARGV[at], requests, rows)
  fold_statistics(KEYS[1], at + 1, ARGV[at])
end
return table.concat(marks)
