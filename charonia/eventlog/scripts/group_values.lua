-- Included by scripts that look at groups of unsettled requests: what a group's value in u:{m} says.
--
-- A value is one byte per member (128 + attempt, or `.` when settled), then `:` when the members' last bytes are
-- 0, 1, 2, ..., or `;` and their last bytes, then the sizes together, then each one's after a comma unless all are equal,
-- then `:` and the tenant if there is one.
-- A group's name is what its ids have in common: all but the last byte.
local SEQUENCE = '\0\1\2\3\4\5\6\7\8\9\10\11\12\13\14\15\16\17\18\19\20\21\22\23\24\25\26\27\28\29\30\31'
  .. '\32\33\34\35\36\37\38\39\40\41\42\43\44\45\46\47\48\49\50\51\52\53\54\55\56\57\58\59\60\61\62\63'

-- The bytes of a group that lie after its marks when `lasts` are all its members, at one attempt not above `attempt`;
-- else nil.
local function whole(value, lasts, attempt)
  local n, mark = #lasts, string.byte(value)
  local cut = string.byte(value, n + 1)
  if mark == 46 or mark - 128 > attempt or string.sub(value, 1, n) ~= string.rep(string.char(mark), n) then
    return nil
  elseif cut == 58 then
    return lasts == string.sub(SEQUENCE, 1, n) and string.sub(value, n + 2) or nil
  end
  return cut == 59 and lasts == string.sub(value, n + 2, 2 * n + 1) and string.sub(value, 2 * n + 2) or nil
end

-- The marks of a group's members, the members' places by last byte (nil when those are 0, 1, 2, ...), and where in the
-- value the marks end.
local function marks_of(value)
  local cut = string.find(value, '[:;]')
  local places = nil
  if string.byte(value, cut) == 59 then
    places = {}
    for place = 1, cut - 1 do
      places[string.byte(value, cut + place)] = place
    end
  end
  return {string.byte(value, 1, cut - 1)}, places, cut
end

-- What a script answers about the requests of its groups, from the masks by group: one without a mask has all of them.
local function joined_masks(masks, at, groups)
  local parts = {}
  for k = 0, groups - 1 do
    parts[k + 1] = masks[k] or string.rep('1', #ARGV[at + groups + k])
  end
  return table.concat(parts)
end
