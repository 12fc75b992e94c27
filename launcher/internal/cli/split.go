package cli

import (
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// Split sorts arguments behind a first one: flags that own has are the command's, and all others the program's, with the values that
// follow them. Behind "--" all are the program's.
func Split(args []string, own *pflag.FlagSet) (command, program []string) {
	for i := 0; i < len(args); {
		if args[i] == "--" {
			return command, append(program, args[i+1:]...)
		}
		name, _, whole := cutFlag(args[i])
		to, n := &program, 1
		if f := own.Lookup(name); f != nil {
			if to = &command; !whole && f.NoOptDefVal == "" {
				n = 2
			}
		} else if !whole && name != "" && i+1 < len(args) && isValue(args[i+1]) {
			n = 2
		}
		n = min(n, len(args)-i)
		*to = append(*to, args[i:i+n]...)
		i += n
	}
	return command, program
}

// Override returns the flags of a program with more of them. One that is given again replaces the one before where both have a value,
// and otherwise follows it.
func Override(was, more []string) []string {
	again := make(map[string]bool)
	each(more, func(name string, valued bool, _ []string) {
		if valued {
			again[name] = true
		}
	})
	left := []string{}
	each(was, func(name string, valued bool, args []string) {
		if !valued || !again[name] {
			left = append(left, args...)
		}
	})
	return slices.Concat(left, more)
}

// each calls f with each flag, whether it has a value, and its arguments.
func each(args []string, f func(name string, valued bool, args []string)) {
	for i := 0; i < len(args); {
		name, _, valued := cutFlag(args[i])
		n := 1
		if !valued && name != "" && i+1 < len(args) && isValue(args[i+1]) {
			valued, n = true, 2
		}
		f(name, valued, args[i:i+n])
		i += n
	}
}

// cutFlag returns the name of a flag, "" for anything else, and its value where that stands in the same argument.
func cutFlag(arg string) (name, value string, whole bool) {
	if isValue(arg) {
		return "", "", false
	}
	return strings.Cut(strings.TrimPrefix(strings.TrimPrefix(arg, "-"), "-"), "=")
}

// isValue reports whether an argument is the value of a flag, such as -1, and not a flag.
func isValue(arg string) bool {
	return len(arg) < 2 || arg[0] != '-' || arg[1] >= '0' && arg[1] <= '9' || arg[1] == '.'
}
