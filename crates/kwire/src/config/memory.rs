//! What this machine has: cores and free memory, within the limits of the container.

/// Cores that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Bytes that can be taken without swapping: the system's estimate, and what the control group leaves. 4 GiB where neither
/// is known.
pub fn available_memory() -> u64 {
    let system = read_kib("/proc/meminfo", "MemAvailable:");
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let limit = number("/sys/fs/cgroup/memory.max");
    let group = limit.map(|limit| limit.saturating_sub(number("/sys/fs/cgroup/memory.current").unwrap_or(0)));
    system.into_iter().chain(group).min().unwrap_or(4 << 30)
}

fn read_kib(path: &str, key: &str) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    #[test]
    fn this_machine_has_something() {
        assert!(super::cores() >= 1);
        assert!(super::available_memory() > 1 << 20);
    }
}
