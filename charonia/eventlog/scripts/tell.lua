-- Included by scripts that add facts to a journal (charonia.facts.journal).
--
-- journal  j:{m}; gets the packed fact unless it is true of none, with a field `w` when it is not true of all it is
--          about: "1" or "0" for each
-- mask     a character for each request of the call: "1" when the fact is true of it; nil when it is of all
-- of       "1" for each request of the call that the fact is about and "0" for the others; "" when it is about all
local function tell(journal, fact, mask, of)
  if not mask then
    return redis.call('XADD', journal, '*', 'f', fact)
  elseif of ~= '' then
    local told = {}
    for i = 1, #mask do
      if string.byte(of, i) == 49 then
        told[#told + 1] = string.sub(mask, i, i)
      end
    end
    mask = table.concat(told)
  end
  if string.find(mask, '1', 1, true) then
    redis.call('XADD', journal, '*', 'f', fact, 'w', mask)
  end
end
