#!lua flags=allow-oom
-- End requests of one model that are no jobs, and all or none of them journalled: the first settle of a request wins, one
-- of an older attempt is fenced. Allowed when the server is out of memory: settling is what frees it.
--
-- KEYS[1] u:{m}                 hash of unsettled requests in groups (see group_values.lua); loses the requests won
-- KEYS[2] n:{m}                 hash; `requests` and `bytes` shrink by the requests won, n:{m}:<tenant> likewise
-- KEYS[3] s:{m}:<version>:<hash> statistics hash, or u:{m} without statistics; grows by what was won
-- KEYS[4] j:{m}                 journal (only given with a fact); gets the `ended` fact when a request was won
--
-- ARGV[1] g, how many groups
-- ARGV[2] the attempts: one number for all requests, or one for each, comma separated
-- ARGV[3] how many of the statistics are sums, those after them are maxima of non-negative integers; or "run"
-- ARGV[4] the packed `ended` fact, "" for none
-- ARGV[5] rows of the requests: one number for all, or one for each, comma separated; "" when the statistics count only
--         when all were won
-- then g group names, then g strings of last bytes, then the statistics: their names, then their values
--
-- Returns 1 when all were won, else a string with one character for each request: "1" won, "0" not.

--#include group_values.lua
--#include take_groups.lua
--#include fold_statistics.lua
--#include tell.lua

local groups = tonumber(ARGV[1])
local mask = take_groups(KEYS[1], KEYS[2], 6, groups, ARGV[2])
if KEYS[4] then
  tell(KEYS[4], ARGV[4], mask, '')
end
local at = 6 + 2 * groups
if mask then
  fold_won(KEYS[3], at, ARGV[3], mask, ARGV[5])
  return mask
end
fold_statistics(KEYS[3], at, ARGV[3])
return 1
