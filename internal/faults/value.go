package faults

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxValue bounds what an error shows of a value, in characters.
const maxValue = 80

// Value returns the text of a flag as an error shows it: as it was given, or quoted where that would be misread, such as nothing or
// a line end, and cut off where it is long.
func Value(text string) string {
	plain := text != "" && strings.TrimSpace(text) == text && utf8.ValidString(text) &&
		!strings.ContainsFunc(text, func(r rune) bool { return !strconv.IsGraphic(r) })
	switch {
	case utf8.RuneCountInString(text) > maxValue:
		return fmt.Sprintf("%.*q...", maxValue, text)
	case !plain:
		return strconv.Quote(text)
	}
	return text
}
