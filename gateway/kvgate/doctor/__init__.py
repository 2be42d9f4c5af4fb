"""`kvgate doctor`: looks at a host before or beside a running gateway, and says what is wrong and what mends it. Changes nothing."""
