//! Which input buffers are one memory, and who shares it. The memory itself is held elsewhere.

use std::fmt;

use crate::dtype::DType;
use crate::error::SlotFault;
use crate::slot::PaddingPolicy;

/// What makes two buffers candidates for one memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolKey {
    name: String,
    numel: usize,
    dtype: DType,
    device: String,
}

impl PoolKey {
    /// The key of a buffer. Spellings do not matter: `long` is `int64`, `cpu:0` is `cpu`, and a device without a number is
    /// the current one of its kind.
    ///
    /// # Errors
    /// A dtype or a device that cannot be read as one.
    pub fn new(name: &str, numel: usize, dtype: &str, device: &str, current: usize) -> Result<Self, SlotFault> {
        Ok(Self {
            name: name.to_owned(),
            numel,
            dtype: DType::parse(dtype).ok_or_else(|| SlotFault::unsupported_dtype(name, dtype))?,
            device: in_full(device, current)?,
        })
    }

    fn bytes(&self) -> usize {
        self.numel.saturating_mul(self.dtype.itemsize())
    }
}

fn in_full(device: &str, current: usize) -> Result<String, SlotFault> {
    let (kind, index) = match device.split_once(':') {
        Some((kind, index)) => (kind, index.parse().map_err(|_| SlotFault::bad_device(device))?),
        None => (device, current),
    };
    if kind.is_empty() || !kind.bytes().all(|byte| byte.is_ascii_lowercase()) {
        return Err(SlotFault::bad_device(device));
    }
    Ok(if kind == "cpu" { kind.to_owned() } else { format!("{kind}:{index}") })
}

/// How a user relies on what its buffer holds, which decides whom it can share with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reliance {
    /// Its padding policy.
    pub policy: PaddingPolicy,
    /// The bytes of its pad value.
    pub pad: Vec<u8>,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Each of its fills writes all rows that are then read, so that it does not matter what they held.
    pub rewrites: bool,
    /// Its fills write live rows; else only the model or a hook does.
    pub fed: bool,
}

impl Reliance {
    /// Whether two users can have one memory and each still find what its policy promises.
    ///
    /// Users that rewrite restore their rows before each use, whatever others did. Users that keep rows find those of
    /// their like. What `FOREACH_COPY` keeps are rows that any fill of the same shape may have copied, and zeros; a foreign
    /// sentinel is neither.
    pub fn shares_with(&self, other: &Self) -> bool {
        (self.rewrites && other.rewrites) || self == other || self.takes_rows_of(other) || other.takes_rows_of(self)
    }

    fn takes_rows_of(&self, other: &Self) -> bool {
        self.policy == PaddingPolicy::ForeachCopy
            && self.fed
            && other.rewrites
            && self.shape == other.shape
            && (other.policy == PaddingPolicy::Zero || other.pad.iter().all(|byte| *byte == 0))
    }
}

/// One user of a buffer.
#[derive(Debug, Clone)]
struct User {
    id: u64,
    owner: String,
    reliance: Reliance,
}

/// One memory and its users.
#[derive(Debug, Clone)]
struct Entry {
    id: u64,
    key: PoolKey,
    users: Vec<User>,
}

/// What joining the ledger gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Joined {
    /// The memory.
    pub entry: u64,
    /// The user, to be named when it leaves.
    pub user: u64,
    /// Whether the memory is new, so that it must be allocated.
    pub fresh: bool,
}

/// Who shares which memory. Numbers are never used again.
#[derive(Debug, Default)]
pub struct Ledger {
    entries: Vec<Entry>,
    last: u64,
}

impl Ledger {
    /// Adds a user: to the first memory of that key whose users it can share with, else to a new one.
    pub fn join(&mut self, key: PoolKey, owner: String, reliance: Reliance) -> Joined {
        let user = self.next();
        let fits =
            |entry: &Entry| entry.key == key && entry.users.iter().all(|user| user.reliance.shares_with(&reliance));
        let found = self.entries.iter().position(fits);
        let index = found.unwrap_or_else(|| {
            let id = self.next();
            self.entries.push(Entry { id, key, users: Vec::new() });
            self.entries.len() - 1
        });
        let entry = &mut self.entries[index];
        entry.users.push(User { id: user, owner, reliance });
        Joined { entry: entry.id, user, fresh: found.is_none() }
    }

    fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Removes a user, and returns its memory where that has no other; an unknown user is nobody's last.
    pub fn leave(&mut self, user: u64) -> Option<u64> {
        let index = self.entries.iter().position(|entry| entry.users.iter().any(|known| known.id == user))?;
        let entry = &mut self.entries[index];
        entry.users.retain(|known| known.id != user);
        if entry.users.is_empty() { Some(self.entries.remove(index).id) } else { None }
    }

    /// The owners of a memory's users, in the order in which they came; none where there is no such memory.
    pub fn owners(&self, memory: u64) -> Vec<String> {
        let entry = self.entries.iter().find(|entry| entry.id == memory);
        entry.map_or_else(Vec::new, |entry| entry.users.iter().map(|user| user.owner.clone()).collect())
    }

    /// How many memories there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes of all memories.
    pub fn bytes(&self) -> usize {
        self.entries.iter().fold(0, |all, entry| all.saturating_add(entry.key.bytes()))
    }

    /// Bytes that the users would take besides, if each had its own.
    pub fn saved_bytes(&self) -> usize {
        let saved = |entry: &Entry| entry.key.bytes().saturating_mul(entry.users.len() - 1);
        self.entries.iter().fold(0, |all, entry| all.saturating_add(saved(entry)))
    }
}

impl fmt::Display for Ledger {
    /// A line for each memory, in order of creation: what it is, its bytes, and who shares it in which shape.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "input-buffer pool: {} buffers, {} bytes, {} bytes saved by sharing",
            self.len(),
            self.bytes(),
            self.saved_bytes()
        )?;
        let width = self.entries.iter().map(|entry| entry.key.name.chars().count()).max().unwrap_or(0);
        for Entry { key, users, .. } in &self.entries {
            let users: Vec<_> = users.iter().map(|user| format!("{} {:?}", user.owner, user.reliance.shape)).collect();
            write!(
                f,
                "\n  {:width$}  {:8}  {:8}  {:>10} bytes  {}",
                key.name,
                key.dtype.name(),
                key.device,
                key.bytes(),
                users.join(", ")
            )?;
        }
        Ok(())
    }
}
