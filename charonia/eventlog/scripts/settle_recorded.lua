#!lua flags=allow-oom
-- End requests of one model of which some are jobs, journalled or of sequences; in all else like settle.lua. What is won
-- gets its end, result and last event recorded in its job record, a fact in the journal, and its sequence's record.
--
-- KEYS[1] u:{m}                 hash of unsettled requests in groups (see group_values.lua); loses the requests won
-- KEYS[2] n:{m}                 hash; `requests` and `bytes` shrink, `kept` grows by the records of jobs that ended,
--                               `keep_bytes` is what it may be (read only); n:{m}:<tenant> shrinks likewise
-- KEYS[3] s:{m}:<version>:<hash> statistics hash, or u:{m} without statistics; grows by what was won
-- KEYS[4] j:{m}                 journal; gets one `ended` fact when a journalled request was won
-- KEYS[5] ja:{m}                active jobs; lose the ended ones, and so do ja:{m}:x, those with a deadline, and
--                               ja:{m}:<level>:<lane>, those that wait there
-- KEYS[6] jd:{m}                ended jobs: id and counted size -> time ended; gets the ended ones
-- KEYS[7] wh:{m}                gets an entry for each ended job that has a webhook
-- KEYS[8] sl:{m}                live sequences; what settled requests of theirs say is set or deleted
-- KEYS[9] st:{m}                states of sequences, likewise
-- KEYS[10..] job:{m}:<id>       the records of the jobs that end, in the order of the ends below
-- Deleted besides, by name: job:{m}:<id>, jr:{m}:<id> and idem:{m}:<key> of the oldest ended jobs, when `kept` is too
-- much. The jr:{m}:<id> and idem:{m}:<key> of an ended job get its expiry.
--
-- ARGV[1] g, how many groups
-- ARGV[2] the attempts: one number for all requests, or one for each, comma separated
-- ARGV[3] how many of the statistics are sums, those after them are maxima of non-negative integers; or "run"
-- ARGV[4] how many jobs end
-- ARGV[5] the packed `ended` fact about the journalled requests, "" when none is
-- ARGV[6] which requests are journalled: "1" or "0" for each, "" when all are
-- ARGV[7] how many requests are of sequences
-- ARGV[8] rows of the requests, as in settle.lua
-- then g group names, then g strings of last bytes
-- then for each job that ends: number of its request in this call, id, state, packed kind and detail, result
-- then for each request of a sequence: its number, the sequence's key, what is known of it ("" when it ends), "1" when a
--      state follows, the state
-- then the statistics: their names, then their values
--
-- Returns 1 when all were won, else a string with one character for each request: "1" won, "0" not.

--#include group_values.lua
--#include take_groups.lua
--#include fold_statistics.lua
--#include job_events.lua
--#include tell.lua

local groups, ends, steps = tonumber(ARGV[1]), tonumber(ARGV[4]), tonumber(ARGV[7])
local mask = take_groups(KEYS[1], KEYS[2], 9, groups, ARGV[2])
local at = 9 + 2 * groups
local tag = string.sub(KEYS[2], 3)
local RECORD_SIZE = 512

-- Forget what has expired among the oldest ended jobs; when they are too much, delete the oldest.
local function keep_within_bounds(kept, looks)
  local most = tonumber(redis.call('HGET', KEYS[2], 'keep_bytes') or 0)
  local over = most > 0 and kept > most
  local left, before = {}, kept
  for _, member in ipairs(redis.call('ZRANGE', KEYS[6], 0, (over and looks + 64 or looks) - 1)) do
    local key = job_in_slot(tag, string.sub(member, 1, 16))
    if redis.call('EXISTS', key) == 0 then
      redis.call('ZREM', KEYS[6], member)
      kept = kept - tonumber(string.sub(member, 17))
    else
      left[#left + 1] = {member, key}
    end
  end
  if over then
    for _, one in ipairs(left) do
      if kept <= most then
        break
      end
      local digest = redis.call('HGET', one[2], 'i')
      if digest then
        redis.call('UNLINK', key_in_slot(tag, digest))
      end
      redis.call('UNLINK', one[2], responses_in_slot(tag, string.sub(one[1], 1, 16)))
      redis.call('ZREM', KEYS[6], one[1])
      kept = kept - tonumber(string.sub(one[1], 17))
    end
  end
  if kept ~= before then
    redis.call('HINCRBY', KEYS[2], 'kept', kept - before)
  end
end

local ended, size = 0, 0
for i = 1, ends do
  local first = at + 5 * (i - 1)
  local number, id = tonumber(ARGV[first]), ARGV[first + 1]
  if not mask or string.byte(mask, number) == 49 then
    local key, time_us = KEYS[9 + i], now_us()
    local job = redis.call('HMGET', key, 's', 'v', 'k', 'i', 'w', 'b', 'f', 'x', 'l')
    if job[1] == 'q' or job[1] == 'r' then
      local result, last = ARGV[first + 4], (job[2] or 1) + 1
      local time = string.format('%.0f', time_us)
      redis.call('HSET', key, 's', ARGV[first + 2], 'u', time, 'v', last, 'e' .. last, event(time_us, ARGV[first + 3]))
      if #result > 0 then
        redis.call('HSET', key, 'y', #result, 'r', result)
      end
      local expires_ms = string.format('%.0f', math.floor(time_us / 1000) + job[3] * 1000)
      redis.call('PEXPIREAT', key, expires_ms)
      if job[4] then
        redis.call('PEXPIREAT', key_in_slot(tag, job[4]), expires_ms)
      end
      if job[7] then
        redis.call('PEXPIREAT', responses_in_slot(tag, id), expires_ms)
      end
      redis.call('ZREM', KEYS[5], id)
      if job[8] then
        redis.call('ZREM', KEYS[5] .. ':x', id)
      end
      if job[9] then
        redis.call('ZREM', KEYS[5] .. ':' .. job[9], id)
      end
      local kept = RECORD_SIZE + #result + #ARGV[first + 3] + #(job[6] or '') + tonumber(job[7] or 0)
      redis.call('ZADD', KEYS[6], time, id .. string.format('%d', kept))
      if job[5] then
        redis.call('XADD', KEYS[7], '*', 'i', hex(id))
      end
      ended, size = ended + 1, size + kept
    end
  end
end
if ended > 0 then
  keep_within_bounds(redis.call('HINCRBY', KEYS[2], 'kept', size), 2 * ended)
end

at = at + 5 * ends
for i = 1, steps do
  local first = at + 5 * (i - 1)
  if not mask or string.byte(mask, tonumber(ARGV[first])) == 49 then
    local key = ARGV[first + 1]
    if ARGV[first + 2] == '' then
      redis.call('HDEL', KEYS[8], key)
      redis.call('HDEL', KEYS[9], key)
    else
      redis.call('HSET', KEYS[8], key, ARGV[first + 2])
      if ARGV[first + 3] == '1' then
        redis.call('HSET', KEYS[9], key, ARGV[first + 4])
      end
    end
  end
end

if ARGV[5] ~= '' then
  tell(KEYS[4], ARGV[5], mask, ARGV[6])
end
at = at + 5 * steps
if mask then
  fold_won(KEYS[3], at, ARGV[3], mask, ARGV[8])
  return mask
end
fold_statistics(KEYS[3], at, ARGV[3])
return 1
