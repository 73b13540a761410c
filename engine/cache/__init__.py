"""The prefix cache: one pool of units for the blocks of attention and for recurrent states. Knows no device."""
