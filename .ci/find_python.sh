#!/bin/sh
# Prints a Python that runs: the first of the versions or paths that the arguments name, on the PATH or in pyenv.
for wanted in "$@"; do
	case $wanted in
		*/*) candidates=$wanted ;;
		python*) candidates=$wanted; wanted=${wanted#python} ;;
		*) candidates="python$wanted python3 $(ls -d "$(pyenv root 2>/dev/null)/versions/$wanted".*/bin/python 2>/dev/null)" ;;
	esac
	for candidate in $candidates; do
		# A command that exists may still fail (version managers install such shims), so each is run.
		version=$($candidate -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
		case $wanted in
			*/* | "" | "$version") echo "$candidate"; exit 0 ;;
		esac
	done
done
echo "make: none of these Pythons is here: $*." >&2
echo "make: install one, or name its path: make PYTHON=/path/to/python3.11" >&2
exit 1
