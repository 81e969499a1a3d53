"""Chat templates: rendering, and the sandbox that keeps a hostile one in bounds."""
