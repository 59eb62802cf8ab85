#!lua flags=no-writes,allow-oom
-- Where a job stands among the active ones of its model, and how many of them each level and lane has.
--
-- KEYS[1] ja:{m}        active jobs: id -> time accepted (read only)
-- KEYS[2] ql:{m}        set of "<level>:<lane>" (read only)
-- KEYS[3] job:{m}:<id>  the job's record (read only)
-- KEYS[4] n:{m}         hash; `requests` are all unsettled ones, `paused`, `owner` (read only)
-- Read besides, by name: ja:{m}:<level>:<lane>, active jobs of each but 0:0, which has those that are in none of them.
--
-- ARGV[1] the job's id
-- ARGV[2] with more levels and lanes than this they are not told apart
--
-- Returns false when the job is not active; else how many active jobs of its own level and lane were accepted before it,
-- the requests, 1 if paused, the owner, "<level>:<lane>", then of each that has active jobs: "<level>:<lane>", how many.

local rank, active = redis.call('ZRANK', KEYS[1], ARGV[1]), redis.call('ZCARD', KEYS[1])
if not rank then
  return false
end
local model = redis.call('HMGET', KEYS[4], 'requests', 'paused', 'owner')
local job = redis.call('HMGET', KEYS[3], 'l', 't')
local own = job[1] or '0:0'
local own_rank = own == '0:0' and rank or redis.call('ZRANK', KEYS[1] .. ':' .. own, ARGV[1])
if not own_rank or redis.call('SCARD', KEYS[2]) > tonumber(ARGV[2]) then
  return {rank, model[1] or 0, model[2] and 1 or 0, model[3] or '', own, own, active}
end
local found, first = {0, model[1] or 0, model[2] and 1 or 0, model[3] or '', own}, active
for _, line in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  if line ~= '0:0' then
    local key = KEYS[1] .. ':' .. line
    local count = redis.call('ZCARD', key)
    if count > 0 then
      found[#found + 1], found[#found + 2], first = line, count, first - count
      if own == '0:0' then
        own_rank = own_rank - redis.call('ZCOUNT', key, '-inf', '(' .. (job[2] or 0))
      end
    end
  end
end
if first > 0 then
  found[#found + 1], found[#found + 2] = '0:0', first
end
found[1] = math.max(0, own_rank)
return found
