package cli

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/soliton-train/soliton/internal/faults"
)

// Within is the error of a flag whose value is not from least to most, nil for another value. more may say more of least.
func Within[T cmp.Ordered](flag string, value, least, most T, more ...string) error {
	switch {
	case value >= least && value <= most:
		return nil
	case value > most:
		return fmt.Errorf("--%s %v: give at most %v", flag, value, most)
	}
	text := fmt.Sprintf("--%s %v: give at least %v", flag, value, least)
	for _, m := range more {
		text += m
	}
	return errors.New(text)
}

// kinds are what flags want, by their types.
var kinds = map[string]string{
	"int": "a whole number", "float64": "a number", "bool": "true or false", "duration": "a time, such as 1s", "range": "FROM-TO, such as 20000-20099, of 1 to 65535",
}

// FlagError makes one clear line of an error of a command's flags.
func FlagError(_ *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	if errors.As(err, &unknown) {
		if letters := unknown.GetSpecifiedShortnames(); letters != "" && isValue("-"+letters) {
			return fmt.Errorf("-%s: there is no such flag, and no number below 0 is wanted", letters)
		}
	}
	var invalid *pflag.InvalidValueError
	if !errors.As(err, &invalid) {
		return err
	}
	f := invalid.GetFlag()
	return fmt.Errorf("--%s %s: give %s", f.Name, faults.Value(invalid.GetValue()), cmp.Or(kinds[f.Value.Type()], "another value"))
}
