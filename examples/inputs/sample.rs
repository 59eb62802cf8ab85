use std::collections::BTreeMap;
use std::io::{self, BufRead};

/// Highest water of each day, in metres.
fn highest_by_day(lines: impl Iterator<Item = String>) -> BTreeMap<String, f64> {
    let mut highest: BTreeMap<String, f64> = BTreeMap::new();
    for line in lines {
        let mut fields = line.split(',');
        if let (Some(time), Some(level)) = (fields.next(), fields.next()) {
            if let Ok(level_m) = level.trim().parse::<f64>() {
                let day = time.chars().take(10).collect::<String>();
                let entry = highest.entry(day).or_insert(f64::NEG_INFINITY);
                *entry = entry.max(level_m);
            }
        }
    }
    highest
}

fn main() {
    let lines = io::stdin().lock().lines().map_while(Result::ok);
    for (day, level_m) in highest_by_day(lines) {
        println!("{day} {level_m:.2} m");
    }
}
