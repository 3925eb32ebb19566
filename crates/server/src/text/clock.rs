//! `strftime` for templates, in UTC.

/// A moment in seconds since 1970 as `format` asks, in the C locale. Unknown directives stay as they are.
pub fn strftime(format: &str, unix_s: i64) -> String {
    let (days, second) = (unix_s.div_euclid(86_400), unix_s.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let weekday = (days + 4).rem_euclid(7); // 1970-01-01 was a Thursday
    let year_day = days - days_from_civil(year, 1, 1) + 1;
    let hour12 = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let Some(mut directive) = chars.next() else {
            out.push('%');
            break;
        };
        let bare = directive == '-';
        if bare {
            directive = chars.next().unwrap_or('-');
        }
        let pad = |n: i64, width: usize| if bare { n.to_string() } else { format!("{n:0width$}") };
        out.push_str(&match directive {
            'Y' => year.to_string(),
            'y' => pad(year.rem_euclid(100), 2),
            'm' => pad(month, 2),
            'd' => pad(day, 2),
            'e' => format!("{day:2}"),
            'H' => pad(hour, 2),
            'I' => pad(hour12, 2),
            'M' => pad(minute, 2),
            'S' => pad(second, 2),
            'f' => "000000".to_owned(),
            'j' => pad(year_day, 3),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'A' => WEEKDAYS[weekday as usize].to_owned(),
            'a' => WEEKDAYS[weekday as usize][..3].to_owned(),
            'B' => MONTHS[month as usize - 1].to_owned(),
            'b' | 'h' => MONTHS[month as usize - 1][..3].to_owned(),
            'w' => weekday.to_string(),
            'u' => ((weekday + 6) % 7 + 1).to_string(),
            'F' => format!("{year}-{month:02}-{day:02}"),
            'T' => format!("{hour:02}:{minute:02}:{second:02}"),
            'R' => format!("{hour:02}:{minute:02}"),
            'D' => format!("{month:02}/{day:02}/{:02}", year.rem_euclid(100)),
            'c' => format!(
                "{} {} {day:2} {hour:02}:{minute:02}:{second:02} {year}",
                &WEEKDAYS[weekday as usize][..3],
                &MONTHS[month as usize - 1][..3]
            ),
            'x' => format!("{month:02}/{day:02}/{:02}", year.rem_euclid(100)),
            'X' => format!("{hour:02}:{minute:02}:{second:02}"),
            's' => unix_s.to_string(),
            'z' | 'Z' => String::new(), // as Python, for a time without a zone
            '%' => "%".to_owned(),
            other => format!("%{other}"),
        });
    }
    out
}

const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Year, month and day of a day number (Howard Hinnant, "chrono-compatible low-level date algorithms").
fn civil(days: i64) -> (i64, i64, i64) {
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let doe = z.rem_euclid(146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    (yoe + era * 400 + i64::from(month <= 2), month, doy - (153 * mp + 2) / 5 + 1)
}

/// The inverse of [`civil`].
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let y = year - i64::from(month <= 2);
    let era = y.div_euclid(400);
    let yoe = y.rem_euclid(400);
    let doy = (153 * (if month > 2 { month - 3 } else { month + 9 }) + 2) / 5 + day - 1;
    era * 146_097 + yoe * 365 + yoe / 4 - yoe / 100 + doy - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right() {
        assert_eq!(strftime("%Y-%m-%d %H:%M:%S %A %j", 0), "1970-01-01 00:00:00 Thursday 001");
        assert_eq!(strftime("%d %b %Y, %-d %B %I%p %a", 1_720_256_703), "06 Jul 2024, 6 July 09AM Sat");
        assert_eq!(strftime("%F %T %y %%", 951_782_400), "2000-02-29 00:00:00 00 %");
    }
}
