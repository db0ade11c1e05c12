"""Pages for people: server-rendered HTML that works without scripts; they change nothing."""
