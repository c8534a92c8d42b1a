//! Every sentence that the core says when it refuses something.
