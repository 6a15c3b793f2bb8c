"""Only read: the launcher looks which flags there are."""

FLAGS = ("--temp-directory", "--user-directory", "--database-url", "--output-directory")
